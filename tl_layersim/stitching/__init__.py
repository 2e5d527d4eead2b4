"""Stitching: an adapter joins the lower blocks of one model to the upper blocks of another."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
