"""The search: python -m hwnas.search +target=xeon_int8"""
