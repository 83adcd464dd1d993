"""int8 under a limit on lost accuracy: python -m hwnas.compress"""
