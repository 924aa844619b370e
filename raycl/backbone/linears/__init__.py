"""Linears of a backbone that torch does not compute alone: quantized weights, products on CPUs."""
