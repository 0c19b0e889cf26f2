"""Word lists of the clinic's worlds. A name is spelled the same everywhere."""

from __future__ import annotations

FIRST_NAMES = (
    "Abena", "Adil", "Agnes", "Amara", "Anton", "Beatriz", "Bruno", "Carmen", "Chidi", "Dalia",
    "Dmitri", "Elena", "Emeka", "Esther", "Farid", "Greta", "Hana", "Hugo", "Ingrid", "Ivan",
    "Jamal", "Joana", "Kenji", "Leila", "Linus", "Mei", "Milan", "Nadia", "Nora", "Oscar",
    "Petra", "Rafael", "Rosa", "Samir", "Sofia", "Tariq", "Uma", "Viktor", "Yara", "Zoltan",
)  # fmt: skip

LAST_NAMES = (
    "Adeyemi", "Aldana", "Bakker", "Banerjee", "Brandt", "Castillo", "Chen", "Dahl", "Diallo", "Dubois",
    "Eriksen", "Farah", "Fischer", "Fonseca", "Garcia", "Haddad", "Horvat", "Ibrahim", "Jansen", "Kaya",
    "Kimura", "Kowalski", "Laine", "Lindqvist", "Lopez", "Mensah", "Moreau", "Nguyen", "Novak", "Okafor",
    "Park", "Petrov", "Quist", "Rossi", "Santos", "Sharma", "Tanaka", "Varga", "Weber", "Zhang",
)  # fmt: skip

CLINICIANS = (
    "Abara", "Birk", "Costa", "Dane", "Ellis", "Faro", "Grant", "Holt",
    "Imani", "Joss", "Keller", "Lund", "Marsh", "Nair", "Osei", "Pace",
)  # fmt: skip

# Every world has a clinician of the first specialty; it is the only one that needs no referral.
SPECIALTIES = (
    "family medicine", "allergy", "cardiology", "dermatology",
    "neurology", "orthopedics", "podiatry", "urology",
)  # fmt: skip

DRUGS = (
    "Alvorin", "Belsanate", "Corvane", "Dermizol", "Elutrex", "Fenadol", "Glucera", "Hexaline",
    "Indoral", "Lumexa", "Nefrotide", "Oxarin", "Pradilol", "Sotrelle", "Veltrin", "Zentide",
)  # fmt: skip

RECIPIENTS = (
    "Birchwood Hospital", "Harbor Imaging", "Lakeview Clinic", "Meadow Pharmacy",
    "Northside Lab", "Parkway Dental", "Summit Insurance", "Unity Rehab",
)  # fmt: skip
