from .config import TrainConfig as TrainConfig
from .job import Job as Job
from .objective import Objective as Objective
from .pretraining import Pretraining as Pretraining
from .pretraining import TrainData as TrainData
from .pretraining import make_trainer as make_trainer
from .trainer import Trainer as Trainer
