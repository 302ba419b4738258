class StatelessProcessGroup:
    pass
