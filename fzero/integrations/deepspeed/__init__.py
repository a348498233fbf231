"""DeepSpeed's `initialize`, config and methods on an engine of fzero."""

from fzero.integrations.deepspeed._engine import DeepSpeedEngine as DeepSpeedEngine
from fzero.integrations.deepspeed._initialize import initialize as initialize
from fzero.integrations.deepspeed._param_access import (
    safe_get_full_fp32_param as safe_get_full_fp32_param,
)
from fzero.integrations.deepspeed._param_access import safe_get_full_grad as safe_get_full_grad
from fzero.integrations.deepspeed._param_access import (
    safe_get_full_optimizer_state as safe_get_full_optimizer_state,
)
from fzero.integrations.deepspeed._param_access import (
    safe_get_local_fp32_param as safe_get_local_fp32_param,
)
from fzero.integrations.deepspeed._param_access import safe_get_local_grad as safe_get_local_grad
from fzero.integrations.deepspeed._param_access import (
    safe_get_local_optimizer_state as safe_get_local_optimizer_state,
)
from fzero.integrations.deepspeed._param_access import (
    safe_set_full_fp32_param as safe_set_full_fp32_param,
)
from fzero.integrations.deepspeed._param_access import safe_set_full_grad as safe_set_full_grad
from fzero.integrations.deepspeed._param_access import (
    safe_set_full_optimizer_state as safe_set_full_optimizer_state,
)
from fzero.integrations.deepspeed._param_access import (
    safe_set_local_fp32_param as safe_set_local_fp32_param,
)
from fzero.integrations.deepspeed._param_access import safe_set_local_grad as safe_set_local_grad
from fzero.integrations.deepspeed._param_access import (
    safe_set_local_optimizer_state as safe_set_local_optimizer_state,
)
from fzero.integrations.deepspeed._param_access import (
    safe_update_full_grad_vectorized as safe_update_full_grad_vectorized,
)
