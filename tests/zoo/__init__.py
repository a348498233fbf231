"""Small models of many families, with a loss and batches: for tools that must be silent on them."""

from tests.zoo.family import Family as Family
from tests.zoo.plain import PLAIN
from tests.zoo.pretrained import PRETRAINED

FAMILIES = {**PLAIN, **PRETRAINED}
