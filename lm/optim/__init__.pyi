from .adamw import AdamW as AdamW
from .clip import clip_grad_norm as clip_grad_norm
from .muon import Muon as Muon
from .normuon import NorMuon as NorMuon
from .schedules import lr_cosine_schedule as lr_cosine_schedule
from .schedules import lr_wsd_schedule as lr_wsd_schedule
from .sgd import SGD as SGD
from .soap_muon import SoapMuon as SoapMuon
