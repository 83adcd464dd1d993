"""Certificates of accuracy estimators: python -m hwnas.certify"""
