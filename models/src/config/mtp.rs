//! The configuration of multi-token prediction.

use burn_megatron::nn::BuildError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Positions, TransformerConfig, refused};

/// Configuration of multi-token prediction (MTP, DeepSeek-V3, arXiv:2412.19437, section 2.2). At each position, the
/// model also predicts `layers` tokens after the next token. Each additional token is predicted by a separate MTP
/// module. The MTP modules are on the last pipeline stage. The module with the prediction depth `k`, from 1 to
/// `layers`, has two inputs. `h` is the normalized output of module `k - 1`, or of the model for `k = 1`. `e` is the
/// embedding of the token `k` positions ahead. The module computes:
///
/// ```text
/// h' = norm(block([norm(e) | norm(h)] W))
/// ```
///
/// The output layer of the model computes the logits of the following token from `h'`. Training minimizes the loss of
/// the model plus `loss_scaling_factor / layers` times the sum of the losses of all modules (equation 24). The loss of
/// a module is the sum of its token losses, divided by the number of tokens that the loss of the model counts.
/// Generation does not run the MTP modules, except that speculative decoding drafts tokens with the first module
/// (`GenerateConfig::speculative`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MtpConfig {
    /// The number of additional tokens to predict (`num_nextn_predict_layers`). Each additional token has a separate
    /// block.
    pub layers: usize,
    /// The weight of the mean of the MTP losses, above 0. DeepSeek-V3 was trained with 0.3, and later with 0.1.
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
    /// Returns the weight of the loss of one MTP module.
    pub(crate) fn weight(&self) -> f64 {
        self.loss_scaling_factor / self.layers as f64
    }

    /// Checks that the settings are valid for the model.
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
                "invalid mtp.layers = {} for a context of {}: expected fewer than the tokens of the context",
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
