"""Find which network, deployed how, serves a load at a service level for the least money: hwnas choose"""
