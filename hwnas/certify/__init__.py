"""Certificates of accuracy estimators: hwnas certify"""
