"""What a target really executes of a network, or of the blocks of a space: hwnas check"""
