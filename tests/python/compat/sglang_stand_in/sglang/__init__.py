"""A package with the names and signatures of SGLang that torch_overlap.compat.sglang uses, for tests without SGLang."""
