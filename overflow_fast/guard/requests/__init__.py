"""Requests: forwards without autograd, judged for whom they are served."""
