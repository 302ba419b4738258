#include "torch_overlap/ops/schema.h"

namespace torch_overlap::ops {

std::string schema_text(std::string_view op, std::string_view names,
                        const std::vector<SchemaField>& fields, std::string_view results) {
  const bool is_public = op.front() != '_';
  const auto all_names = split_string(names, ',');
  std::string text;
  bool has_default = false;
  for (size_t i = 0; i < fields.size(); ++i) {
    std::string_view name = all_names.at(i);
    name.remove_prefix(name.find_first_not_of(' '));
    text += concat(i == 0 ? "" : ", ", fields[i].type, ' ', name);
    if (has_default) text += "=" + fields[i].value;
    has_default = has_default || (is_public && name == "group_size");
  }
  return concat(op, '(', text, ") -> ", results);
}

}  // namespace torch_overlap::ops
