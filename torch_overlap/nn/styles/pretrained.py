"""Plans for models of Hugging Face transformers."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from torch_overlap._C import StateError
from torch_overlap.nn.cross_entropy import vocabulary_parallel_cross_entropy
from torch_overlap.nn.layout import comm_of
from torch_overlap.nn.styles.base import Style, matching_modules
from torch_overlap.nn.styles.embedding import VocabularyParallel
from torch_overlap.nn.styles.linear import ColumnParallel, RowParallel, SharedGather
from torch_overlap.nn.styles.lora import expect_adapters, inner_modules, peft_prefix
from torch_overlap.nn.styles.pretrained_state import is_pretrained
from torch_overlap.nn.styles.sequence import GatherSequence, SequenceParallel, ShardInput

_COLUMNS = {"colwise": False, "colwise_gather_output": True}  # word of a tp_plan -> gather_output
_ROWS = {"rowwise": True, "rowwise_split_input": False}  # -> input_is_parallel
_PARTIAL = ("replicated_with_grad_allreduce",)


class ParallelLoss(Style):
    """Computes the loss of a causal language model of transformers from logits that are split by vocabulary.

    For the model itself, `""` in a plan, with a head under `ColumnParallel(gather_output=False)`: the logits of the
    output are this rank's part of the vocabulary.
    """

    def __init__(self) -> None:
        super().__init__()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = comm_of(device_mesh)

        def loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None,
                 ignore_index: int = -100, shift_labels: Tensor | None = None, **_: Any) -> Tensor:  # fmt: skip
            if shift_labels is None:  # a row predicts the next token
                shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            reduction = "mean" if num_items_in_batch is None else "sum"
            total = vocabulary_parallel_cross_entropy(
                logits.float(), shift_labels.to(logits.device), comm, ignore_index=ignore_index, reduction=reduction
            )
            return total if num_items_in_batch is None else total / num_items_in_batch

        def generate(*_: Any, **__: Any) -> None:
            raise StateError("generate: expected gathered logits, got this rank's part of the vocabulary. Use "
                             "plan_for(gather_logits=True).")  # fmt: skip

        module.loss_function = loss  # type: ignore[assignment]
        module.generate = generate  # type: ignore[assignment]
        return module


def _expect_causal_loss(model: Any) -> None:
    """Refuses a model whose loss is not that of ParallelLoss: a masked one, for example, does not shift the labels."""
    name = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
    if name != "ForCausalLMLoss":
        raise ValueError(f"plan_for: expected {type(model).__name__} to have the loss ForCausalLMLoss of transformers "
                         f"with gather_logits=False, got {name}. Use gather_logits=True.")  # fmt: skip


class Plan(dict[str, ParallelStyle]):
    """A plan, and `notes`: sentences that say what was decided."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def under(self, prefix: str) -> Plan:
        """Returns the plan of a model whose module at `prefix` this plan is for."""
        plan = Plan()
        plan.update({f"{prefix}{name}".rstrip("."): style for name, style in self.items()})
        plan.notes = self.notes
        return plan

    def __str__(self) -> str:
        styles = [f"{name}: {type(style).__name__}" for name, style in self.items()]
        return "\n".join([*styles, *self.notes])


def plan_for(
    model: nn.Module, ranks: int, *, sequence_parallel: bool = True, gather_logits: bool = True, **options: Any
) -> Plan:
    """Returns a plan for a causal language model of transformers that has a `tp_plan`, for `parallelize`.

        plan = plan_for(model, mesh.size())
        print(plan)
        parallelize(model, mesh, plan)

    Projections that share their input share one gather, the embedding and the head are split by vocabulary, a tie of
    the two is kept, and gradients of norms of split heads are summed. The model's outputs are those of the unsharded
    model, except that `attentions` are of this rank's heads, and with `sequence_parallel` `hidden_states` of its rows.

    Args:
        model: the unsharded model.
        ranks: the number of ranks of the mesh.
        sequence_parallel: if True, each rank has its part of the sequence between the layers' products.
        gather_logits: if False, the logits of the output are this rank's part of the vocabulary, and the loss is
            computed from the parts (`ParallelLoss`). Saves memory and transfers in training; generation needs them
            gathered.
        options: algorithm, require_fused, keep_gathered and fp8 of the linear layers.

    Raises:
        TypeError: the model has no tp_plan, or no input embedding.
        ValueError: the tp_plan has a rule that no style serves, or with sequence_parallel a module that may or may not
            work on rows of its own; gather_logits=False and a loss that is not that of causal language models.
    """
    prefix = peft_prefix(model)
    if prefix:
        plan = plan_for(
            model.get_submodule(prefix[:-1]), ranks, sequence_parallel=sequence_parallel, gather_logits=gather_logits,
            **options,
        )  # fmt: skip
        return plan.under(prefix)
    if not getattr(model, "tp_plan", None) or not is_pretrained(model):
        raise TypeError(f"plan_for: expected a model of transformers with a tp_plan, got {type(model).__name__}. Write "
                        "a plan of the names of its layers; see torch_overlap.nn.styles.")  # fmt: skip
    expect_adapters(model)
    return _Planner(model, ranks, sequence_parallel, gather_logits, options).make()


class _Planner:
    def __init__(self, model: Any, ranks: int, sequence_parallel: bool, gather_logits: bool,
                 options: dict[str, Any]) -> None:  # fmt: skip
        self.model, self.ranks = model, ranks
        self.sequence_parallel, self.gather_logits = sequence_parallel, gather_logits
        self.options = {"sequence_parallel": sequence_parallel, **options}
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.rules: dict[str, str] = dict(model.tp_plan)
        self.plan = Plan()

    def make(self) -> Plan:
        try:
            head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        except NotImplementedError as error:
            raise TypeError(f"plan_for: expected a model with an input embedding of tokens, got "
                            f"{type(self.model).__name__}. Write a plan by hand.") from error  # fmt: skip
        ends = {name: m for name, m in self.modules.items() if m is head or m is embedding}
        self._expect_rules()
        if self.sequence_parallel:
            self._split_sequence(ends)
        self._add_layers(ends)
        self._add_ends(head, embedding, ends)
        return self.plan

    def _add_layers(self, ends: dict[str, nn.Module]) -> None:
        columns: dict[tuple[str, bool], list[str]] = defaultdict(list)
        for pattern, word in self.rules.items():
            names = [name for name, _ in matching_modules(self.model, pattern)]
            if not names:
                self.plan.notes.append(f"no module matches '{pattern}' of the tp_plan")
                continue
            if set(names) <= set(ends):
                continue
            parent, _, child = pattern.rpartition(".")
            if word in _COLUMNS:
                columns[parent, _COLUMNS[word]].append(child)
            elif word in _ROWS:
                self.plan[pattern] = RowParallel(input_is_parallel=_ROWS[word], **self._row_options())
            elif word in _PARTIAL:
                self.plan[pattern] = SequenceParallel()
            else:
                known = ", ".join([*_COLUMNS, *_ROWS, *_PARTIAL])
                raise ValueError(f"plan_for: expected rules of {known} in the tp_plan of {type(self.model).__name__}, "
                                 f"got '{word}' for '{pattern}'. Write a plan by hand.")  # fmt: skip
        if not columns:
            raise ValueError(f"plan_for: expected modules of {type(self.model).__name__} that the rules of its tp_plan "
                             "name, got none. Pass the model itself, not a wrapper.")  # fmt: skip
        for (parent, gathers), children in columns.items():
            if parent in self.plan:
                raise ValueError(f"plan_for: expected projections of one kind in '{parent}', got some with gathered "
                                 "outputs and some without. Write a plan by hand.")  # fmt: skip
            for name, names, modules in self._alike(parent, children):
                self.plan[name] = SharedGather(
                    *names, argument=_first_argument(modules[0]), gather_output=gathers,
                    multiple_of=1 if gathers else math.lcm(*map(_head_size, modules)), **self.options,
                )  # fmt: skip

    def _alike(self, parent: str, children: list[str]) -> Iterator[tuple[str, list[str], list[nn.Module]]]:
        """Yields the modules of a pattern with those of the children that they have: under the pattern if all have all,
        else each under its name. Layers that share keys and values lack the projections of these."""
        found = [(name, module, [child for child in children if getattr(module, child, None) is not None])
                 for name, module in matching_modules(self.model, parent)]  # fmt: skip
        if all(own == children for _, _, own in found):
            yield parent, children, [module for _, module, _ in found]
            return
        for name, module, own in found:
            if own:
                yield name, own, [module]

    def _expect_rules(self) -> None:
        """Refuses parameters without a rule beside split projections: each rank would have a part of their gradient."""
        split = {rule.rpartition(".")[0] for rule, word in self.rules.items() if word in ("colwise", "rowwise")}
        for parent in sorted(split - {""}):
            for _, module in matching_modules(self.model, parent):
                self._expect_rules_in(parent, module)

    def _expect_rules_in(self, parent: str, module: nn.Module) -> None:
        inner = inner_modules(module)
        for name, child in module.named_modules():
            pattern = f"{parent}.{name}" if name else parent
            if name in inner or (name and pattern in self.rules):
                continue
            for parameter, _ in child.named_parameters(recurse=False):
                raise ValueError(f"plan_for: expected a rule in the tp_plan of {type(self.model).__name__} for "
                                 f"'{pattern}', which works beside split projections, got none for its "
                                 f"'{parameter}'. Write a plan by hand.")  # fmt: skip

    def _row_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name != "keep_gathered"}

    def _add_ends(self, head: Any, embedding: Any, ends: dict[str, nn.Module]) -> None:
        tied = head is not None and embedding is not None and head.weight is embedding.weight
        for name, module in ends.items():
            rows = module.get_parameter("weight").size(0)
            if rows % self.ranks != 0:
                self.plan.notes.append(f"{name} is replicated: {self.ranks} ranks do not divide {rows}")
            elif module is embedding:
                self.plan[name] = VocabularyParallel()
            else:
                head_options = {**self._row_options(), "sequence_parallel": False}
                self.plan[name] = ColumnParallel(gather_output=self.gather_logits, **head_options)
                if not self.gather_logits:
                    _expect_causal_loss(self.model)
                    self.plan[""] = ParallelLoss()
        if tied:
            self.plan.notes.append("the head stays tied to the embedding")

    def _split_sequence(self, ends: dict[str, nn.Module]) -> None:
        """Shards the sequence at the first layer, gathers it at the last norm, and marks the norms between."""
        layers = sorted({pattern.split("*")[0].rstrip(".") for pattern in self.rules if "*" in pattern})
        if len(layers) != 1 or f"{layers[0]}.0" not in self.modules:
            raise ValueError(f"plan_for: expected one list of layers in the tp_plan of {type(self.model).__name__}, "
                             f"got {layers}. Use sequence_parallel=False, or write a plan by hand.")  # fmt: skip
        (path,) = layers
        first = self.modules[f"{path}.0"]
        self.plan[f"{path}.0"] = ShardInput(argument=_first_argument(first))
        for _, layer in matching_modules(self.model, f"{path}.*"):
            self._split_layer(path, layer)
        base = path.rpartition(".")[0]
        others = [name for name, module in self.modules.items()
                  if name and name not in ends and name.rpartition(".")[0] == base and name != path
                  and any(True for _ in module.parameters())]  # fmt: skip
        if len(others) != 1:
            raise ValueError(f"plan_for: expected one norm after the layers of {type(self.model).__name__}, got "
                             f"{others}. Use sequence_parallel=False, or write a plan by hand.")  # fmt: skip
        self.plan[others[0]] = GatherSequence()

    def _split_layer(self, path: str, layer: nn.Module) -> None:
        """Marks the norms of a layer. What else it has without a rule may mix the rows of the sequence."""
        inner = inner_modules(layer)
        for name, module in layer.named_modules():
            if not name and any(True for _ in module.parameters(recurse=False)):
                raise ValueError(f"plan_for: expected no parameters of the layers of {type(self.model).__name__} "
                                 "themselves, got some. Use sequence_parallel=False, or write a plan by "
                                 "hand.")  # fmt: skip
            pattern = f"{path}.*.{name}"
            has_rule = name in inner or pattern in self.rules
            if has_rule or not any(True for _ in module.parameters(recurse=False)):
                continue
            if "." in name or not _is_norm(module):
                if self._is_replicated(pattern):
                    continue
                raise ValueError(f"plan_for: expected a rule for '{name}' ({type(module).__name__}) of the layers of "
                                 f"{type(self.model).__name__}, or a norm of the layer itself, got none. Use "
                                 "sequence_parallel=False, or write a plan by hand.")  # fmt: skip
            self.plan[pattern] = SequenceParallel()

    def _is_replicated(self, pattern: str) -> bool:
        """Returns True for a module after a gathered output, as a norm of all heads: every rank computes all of it."""
        parent = pattern.rpartition(".")[0]
        words = {word for rule, word in self.rules.items() if rule.rpartition(".")[0] == parent}
        return words == {"colwise_gather_output", "rowwise_split_input"}


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and all(p.dim() == 1 for p in module.parameters())


def _head_size(attention: nn.Module) -> int:
    return int(getattr(attention, "head_dim", getattr(attention, "head_size", 1)))


def _first_argument(module: nn.Module) -> str:
    return next(iter(inspect.signature(module.forward).parameters))
