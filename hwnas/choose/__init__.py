"""Which network, deployed how, serves a load at a service level for the least money: python -m hwnas.choose"""
