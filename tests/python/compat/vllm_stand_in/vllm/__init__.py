"""A package with the names and signatures of vLLM that torch_overlap.compat.vllm uses, for tests without vLLM.

scripts/check_plugins.py compares the signatures with those recorded from vLLM; the code is of this project.
"""
