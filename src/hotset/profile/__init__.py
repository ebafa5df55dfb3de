"""What was learnt from use: a profile that warms the next start, with its file, its folder, merging and comparing."""

from hotset.profile.profile import Fingerprint, Profile

__all__ = ["Fingerprint", "Profile"]
