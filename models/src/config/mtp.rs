//! Settings of multi-token prediction.

use burn_megatron::nn::BuildError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Positions, TransformerConfig, refused};

/// Multi-token prediction (MTP, DeepSeek-V3, arXiv:2412.19437, section 2.2). At each token, the model also predicts the
/// tokens after the next token. Each of them has a separate module on the last pipeline stage. The input of depth `k`
/// is `h`, the normalized output of depth `k - 1` (of the model for `k = 1`), and `e`, the embedding of the token at
/// distance `k`:
///
/// ```text
/// h' = norm(block([norm(e) | norm(h)] W))
/// ```
///
/// The output layer of the model computes the loss of the following token from `h'`. Training minimises the loss of the
/// model plus `loss_scaling_factor / layers` times the sum over the losses of all depths (equation 24). Each loss is a
/// sum over tokens, divided by the number of tokens in the loss of the model. Generation does not run the modules, except
/// the first module to draft tokens (`GenerateConfig::speculative`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MtpConfig {
    /// The number of additional tokens to predict (`num_nextn_predict_layers`). Each has a block.
    pub layers: usize,
    /// The weight of the mean MTP loss, above 0. DeepSeek-V3 was trained with 0.3, then 0.1.
    pub loss_scaling_factor: f64,
}

impl Default for MtpConfig {
    fn default() -> Self {
        Self {
            layers: 1,
            loss_scaling_factor: 0.1,
        }
    }
}

impl MtpConfig {
    /// Returns the weight of the loss of one depth.
    pub(crate) fn weight(&self) -> f64 {
        self.loss_scaling_factor / self.layers as f64
    }

    /// Checks the settings against the settings of the model.
    pub(crate) fn check(&self, model: &TransformerConfig) -> Result<(), BuildError> {
        let factor = self.loss_scaling_factor;
        if !(factor > 0.0 && (factor as f32) > 0.0 && (factor as f32).is_finite()) {
            return Err(refused(format!(
                "invalid mtp.loss_scaling_factor = {factor}: expected a number above 0 and finite in f32; leave out \
                 [model.mtp] to predict the next token alone"
            )));
        }
        if self.layers >= model.context {
            return Err(refused(format!(
                "invalid mtp.layers = {} for a context of {}: expected fewer than it has tokens",
                self.layers, model.context
            )));
        }
        match model.positions {
            Positions::Rotary { .. } => Ok(()),
            Positions::Learned => Err(refused(
                "mtp requires rotary positions, but the model has learned positions: remove mtp"
                    .into(),
            )),
        }
    }
}
