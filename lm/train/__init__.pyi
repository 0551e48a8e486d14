from .config import TrainConfig as TrainConfig
from .objective import Objective as Objective
from .pretraining import Job as Job
from .pretraining import Pretraining as Pretraining
from .pretraining import TrainData as TrainData
from .pretraining import make_trainer as make_trainer
from .trainer import Trainer as Trainer
