//! The settings of multi-token prediction.

use burn_megatron::nn::BuildError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Positions, TransformerConfig, refused};

/// Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): at each token a model also predicts the tokens after
/// the next one, each by a module of its own on the last stage. Depth `k` computes from the last norm's output `h` of depth
/// `k - 1`, that of the model for `k = 1`, and the embedding `e` of the token `k` later:
///
/// ```text
/// h' = norm(block([norm(e) | norm(h)] W))
/// ```
///
/// and from `h'`, through the output layer of the model, the loss of the token after that. Training minimises the loss of the
/// model plus `loss_scaling_factor / layers` times the sum over these depths, each a sum over tokens divided by the number of
/// the tokens of the model's own loss (equation 24). Generation runs the first module to draft tokens, if it is told to
/// (`GenerateConfig::speculative`), and otherwise none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MtpConfig {
    /// The number of additional predicted tokens (`num_nextn_predict_layers`), with a block for each.
    pub layers: usize,
    /// The weight of the mean loss of the additional tokens, above 0. DeepSeek-V3 was trained with 0.3, then 0.1.
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
    /// The weight of the loss of one depth.
    pub(crate) fn weight(&self) -> f64 {
        self.loss_scaling_factor / self.layers as f64
    }

    /// Checks the settings against those of the model.
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
                "mtp beside learned positions: expected rotary ones".into(),
            )),
        }
    }
}
