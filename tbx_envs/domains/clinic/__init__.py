"""The domain `clinic`, the front desk of an outpatient clinic: `DOMAIN`."""

from __future__ import annotations

from importlib import resources

from tbx_envs.domains import Domain, Topic
from tbx_envs.domains.clinic.families import FAMILIES, VERSION
from tbx_envs.domains.clinic.generate import CLOCK
from tbx_envs.domains.clinic.tables import METADATA
from tbx_envs.domains.clinic.tools import TOOLS
from tbx_envs.domains.lock import read_lock

# What a caller can be asked for. The patterns do not overlap with requests to confirm (`CONSENTS`).
TOPICS = {
    "birth_date": Topic(
        r"birth\s?da(te|y)|date of birth|when were you born",
        ("My birth date is {value}.", "I was born on {value}."),
    ),
    "phone_digits": Topic(
        r"(last|final) (four|4)|phone( number)? on file|(current|old) phone",
        ("My phone ends in {value}.", "The last four are {value}."),
    ),
    "name": Topic(
        r"(your|patient's) (full |first and last )?name|who am I (speaking|talking)",
        ("My name is {value}.", "{value}."),
    ),
    "clinician": Topic(
        r"(which|what|name of the|who is the) (clinician|doctor|visit|appointment)",
        ("With {value}.", "The one with {value}."),
    ),
    "slot": Topic(
        r"(which|what) (open )?(slot|time|day)|when would you",
        ("The {value} open slot.", "The {value} one, please."),
    ),
    "specialty": Topic(r"(which|what) (kind of )?specialt", ("It is {value}.", "For {value}.")),
    "drug": Topic(r"(which|what|name of the) (drug|medicine|medication|prescription)", ("{value}.", "It is {value}.")),
    "fee": Topic(r"(which|what) (fee|charge)", ("The {value} fee.", "It is the {value} fee.")),
    "recipient": Topic(
        r"(which|what|who is the) recipient|(where|to whom|who) (should|shall|do) (I|we|you).{0,20}\bsen[dt]",
        ("To {value}.", "{value}, please."),
    ),
    "new_phone": Topic(r"new (phone|number)", ("The new number is {value}.", "{value}.")),
}

CONSENTS = {
    "late_fee": r"(\bfee\b|\bcosts?\b|\bcharged?\b|\$\d).*\b(agree|accept|okay|ok|consent|confirm|proceed"
    r"|continue|go ahead|still|want|fine|happy|willing)\b"
    r"|\b(agree|accept|consent|okay|ok|fine)\b.*(\bfee\b|\$\d)",
    # At the start of a clause: "Shall I go ahead?" asks to confirm, "Where should I send them?" does not.
    "default": r"(^|[.,:;!?]\s*|\b(and|so|then|but) )(do you (agree|confirm|want|wish)|shall I|should I"
    r"|can you confirm|would you like|is that (right|ok|okay|correct))\b",
}

DOMAIN = Domain(
    name="clinic",
    version=VERSION,
    metadata=METADATA,
    tools=TOOLS,
    rules=(resources.files(__name__) / "rules.md").read_text(encoding="utf-8"),
    clock=CLOCK,
    topics=TOPICS,
    consents=CONSENTS,
    families=FAMILIES,
    lock=read_lock("clinic")[1],
)
