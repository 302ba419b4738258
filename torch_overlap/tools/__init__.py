"""The command line, `python -m torch_overlap`, and the programs behind it.

- bench: compares our operators and collectives with other libraries.
- tune: measures which algorithm of the overlapped operators is the fastest, and writes the cache of "auto".
- plan: predicts the step time and traffic of a transformer on any mesh.
- info: describes the installation and the machine.

The tools import every other package, and no other package imports them.
"""

__all__: list[str] = []
