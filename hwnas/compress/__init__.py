"""int8 under a limit on lost accuracy: hwnas compress"""
