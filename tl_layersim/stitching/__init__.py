"""Stitching: is what one model's lower layers say of any use to another model's upper layers?"""
