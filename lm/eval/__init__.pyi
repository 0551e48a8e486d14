from .loss import bits_per_byte as bits_per_byte
