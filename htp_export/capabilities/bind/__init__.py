"""`bind`: the weights of another checkpoint in a file that was made of the same model, without an export"""
