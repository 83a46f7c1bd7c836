"""The token path beside the unary calls: one TCP connection per worker and gateway, one frame per engine
step.
"""
