//! Selection of fused kernels.
//!
//! Every operation of the [kernels crate](crate::kernels) has two forms that compute the same: a
//! fused kernel with its own backward, and a composition of Burn's operations. [`KernelChoices`] is what the
//! user requests, [`KernelSelection`] what is used on a device with a type.

use std::path::PathBuf;

use burn::tensor::{DType, Device};
use burn_megatron_kernels::attention::EngineKind;
use burn_megatron_kernels::gemm::gelu::check_gelu_epilogues;
use burn_megatron_kernels::gemm::{BlasError, CpuGemm, UnknownCpuGemm};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantArray};

mod attention;
mod epilogues;
mod selection;
#[cfg(test)]
mod tests;

pub use attention::AttentionChoice;
pub use epilogues::{EpilogueFusion, EpilogueShape};
pub use selection::KernelSelection;

/// An operation with a fused and an unfused form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Operation {
    /// LayerNorm and RMSNorm, with the residual addition.
    Norm,
    /// The nonlinearity of the MLP with its bias.
    Activation,
    /// Bias, dropout and residual addition.
    Dropout,
    /// Rotary positions.
    Rope,
    /// Flash attention: scores, softmax and weighted sum, without the scores in memory.
    Attention,
    /// Scale, mask and softmax of scores, if attention is not fused.
    Softmax,
    /// Cross entropy.
    Loss,
    /// Matrix products that add the bias, and accumulate weight gradients, themselves.
    Linear,
    /// AdamW and the sum of squares of the gradient norm.
    Optimizer,
}

impl Operation {
    /// All operations, in the order of a step.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The name in recipes and flags.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The requested form of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[derive(EnumString, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
#[strum(parse_err_ty = KernelChoiceError, parse_err_fn = unknown_choice)]
pub enum KernelChoice {
    /// Fused if the device has the kernel and it is faster.
    #[default]
    Auto,
    /// Fused, or an error if it cannot be.
    Fused,
    /// Burn's operations.
    Unfused,
}

/// The names of settings beside the operations.
const EPILOGUE_FUSION: &str = "epilogue_fusion";
const GEMM_ALGORITHMS: &str = "gemm_algorithms";

/// The requested form of each operation, and its settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KernelChoices {
    /// The form of LayerNorm and RMSNorm with the residual addition.
    pub norm: KernelChoice,
    /// The form of the MLP's activation with its bias.
    pub activation: KernelChoice,
    /// The form of bias, dropout and residual addition.
    pub dropout: KernelChoice,
    /// The form of rotary positions.
    pub rope: KernelChoice,
    /// The form of attention, or the engine of fused attention.
    pub attention: AttentionChoice,
    /// The form of scale, mask and softmax of scores, if attention is not fused.
    pub softmax: KernelChoice,
    /// The form of cross entropy.
    pub loss: KernelChoice,
    /// The number of tokens whose logits are in memory at once, if the loss is fused; 0 for all tokens of a micro-batch. By
    /// default the logits of a chunk take at most
    /// [1 GiB](crate::nn::LogitsShape::tokens_per_chunk).
    pub loss_chunk_size: Option<usize>,
    /// The form of matrix products, which add the bias and accumulate weight gradients.
    pub linear: KernelChoice,
    /// The library for fused products of matrices on the CPU, except the products of experts.
    #[schemars(with = "String", extend("enum" = CpuGemm::ALL.map(CpuGemm::name)))]
    pub gemm: CpuGemm,
    /// Whether the GELU (tanh) of an MLP, its derivative and its bias gradient are
    /// [epilogues](crate::kernels::gemm::gelu) of the neighbouring matrix products. For CUDA.
    /// [`true`](EpilogueFusion::On) is an error if a layer does not allow epilogues.
    pub epilogue_fusion: EpilogueFusion,
    /// The file with cuBLASLt algorithms that `burn-megatron-bench gemm --tune` wrote. Rank 0 reads the file for all
    /// ranks. By default cuBLASLt selects algorithms by its heuristic. For CUDA.
    #[schemars(extend("value" = "PATH", "experimental" = true))]
    pub gemm_algorithms: Option<PathBuf>,
    /// The form of AdamW and of the gradient norm.
    pub optimizer: KernelChoice,
}

impl KernelChoices {
    /// The same choice for every operation.
    pub fn all(choice: KernelChoice) -> Self {
        let mut choices = Self::default();
        choices.choose_all(choice);
        choices
    }

    fn choose_all(&mut self, choice: KernelChoice) {
        for operation in Operation::ALL {
            self.choose(*operation, choice);
        }
    }

    /// Checks that the device has the epilogues that are requested, before a model is built on it.
    ///
    /// # Errors
    ///
    /// [`KernelChoiceError::NoEpilogues`].
    pub fn check_epilogues(&self, device: &Device, dtype: DType) -> Result<(), KernelChoiceError> {
        if self.epilogue_fusion != EpilogueFusion::On {
            return Ok(());
        }
        // Any sizes; those of the model are checked where it is built.
        let checked = check_gelu_epilogues(device, dtype, [64, 64]);
        checked.map_err(KernelChoiceError::NoEpilogues)
    }

    /// Checks that no choice is left to a measurement, for programs that measure none.
    ///
    /// # Errors
    ///
    /// [`KernelChoiceError::NotMeasured`].
    pub fn check_measured(&self) -> Result<(), KernelChoiceError> {
        match self.epilogue_fusion {
            EpilogueFusion::Off | EpilogueFusion::On => Ok(()),
            EpilogueFusion::Measured => Err(KernelChoiceError::NotMeasured),
        }
    }

    /// The choice for one operation.
    pub fn of(&self, operation: Operation) -> KernelChoice {
        match operation {
            Operation::Norm => self.norm,
            Operation::Activation => self.activation,
            Operation::Dropout => self.dropout,
            Operation::Rope => self.rope,
            Operation::Attention => self.attention.form(),
            Operation::Softmax => self.softmax,
            Operation::Loss => self.loss,
            Operation::Linear => self.linear,
            Operation::Optimizer => self.optimizer,
        }
    }

    /// Sets the choice for one operation.
    pub fn choose(&mut self, operation: Operation, choice: KernelChoice) {
        match operation {
            Operation::Norm => self.norm = choice,
            Operation::Activation => self.activation = choice,
            Operation::Dropout => self.dropout = choice,
            Operation::Rope => self.rope = choice,
            Operation::Attention => self.attention = AttentionChoice::Form(choice),
            Operation::Softmax => self.softmax = choice,
            Operation::Loss => self.loss = choice,
            Operation::Linear => self.linear = choice,
            Operation::Optimizer => self.optimizer = choice,
        }
    }

    /// Sets choices from `fused`, `unfused`, `auto`, or a list such as
    /// `norm=unfused,attention=portable,epilogue_fusion=true`.
    ///
    /// # Errors
    ///
    /// [`KernelChoiceError`] for an unknown name.
    pub fn set(&mut self, text: &str) -> Result<(), KernelChoiceError> {
        for part in text.split(',').map(str::trim) {
            match part.split_once('=') {
                None => self.choose_all(part.parse()?),
                Some(("gemm", engine)) => self.gemm = engine.parse()?,
                Some((GEMM_ALGORITHMS, path)) => self.gemm_algorithms = Some(path.into()),
                Some((EPILOGUE_FUSION, value)) => self.epilogue_fusion = value.parse()?,
                Some((name, choice)) => {
                    let unknown = |_| KernelChoiceError::UnknownOperation(name.into());
                    match name.parse().map_err(unknown)? {
                        Operation::Attention => self.attention = choice.parse()?,
                        other => self.choose(other, choice.parse()?),
                    }
                }
            }
        }
        Ok(())
    }
}

impl KernelChoice {
    /// The name in recipes and flags.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

fn unknown_choice(text: &str) -> KernelChoiceError {
    KernelChoiceError::UnknownChoice(text.into())
}

/// An invalid choice.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelChoiceError {
    /// An unknown operation.
    #[error("invalid operation \"{0}\": expected {names}", names = names())]
    UnknownOperation(String),
    /// An unknown choice.
    #[error("invalid kernel choice \"{0}\": expected auto, fused or unfused")]
    UnknownChoice(String),
    /// An unknown choice for attention.
    #[error("invalid kernel choice \"{0}\" of attention: expected auto, fused, unfused, {engines}",
        engines = engines(&EngineKind::ALL, " or "))]
    UnknownAttentionChoice(String),
    /// An unknown value of epilogue_fusion.
    #[error("invalid epilogue_fusion \"{0}\": expected true, false or measured")]
    InvalidEpilogueFusion(String),
    /// Epilogues were requested of operations that are not fused.
    #[error(
        "kernels: epilogue_fusion needs fused {name}, and {name} is unfused ({reason}); use {name} = fused, or remove \
         epilogue_fusion",
        name = .operation.name()
    )]
    UnfusedEpilogue {
        /// The operation.
        operation: Operation,
        /// Why it is not fused.
        reason: String,
    },
    /// A choice was left to a measurement that is not made.
    #[error(
        "kernels: epilogue_fusion = \"measured\" requires pretrain, which measures it: use true or false here"
    )]
    NotMeasured,
    /// Epilogues were requested of a device or type that has none.
    #[error("kernels: epilogue_fusion cannot be used: {0}; remove epilogue_fusion")]
    NoEpilogues(String),
    /// The chunks of a fused loss were set, and it is not fused.
    #[error(
        "kernels: loss_chunk_size = {chunk_size} needs the fused loss, and loss is unfused ({reason}); remove it or fuse the loss"
    )]
    NoChunks {
        /// The setting.
        chunk_size: usize,
        /// Why the loss is not fused.
        reason: String,
    },
    /// An attention engine was requested and is not available.
    #[error("kernels: attention cannot use {reason}; use auto or {others}",
        others = engines(&others(*.engine), " or "))]
    NoEngine {
        /// The engine.
        engine: EngineKind,
        /// The engine and why it is not available.
        reason: String,
    },
    /// An unknown engine of products.
    #[error(transparent)]
    UnknownGemm(#[from] UnknownCpuGemm),
    /// A library was requested for products that it does not compute.
    #[error("kernels: gemm = {gemm} needs {needed}; use gemm = gemm, or {fits}")]
    NoBlas {
        /// The library.
        gemm: CpuGemm,
        /// The missing requirement.
        needed: &'static str,
        /// The values that would fit.
        fits: &'static str,
    },
    /// A library cannot be opened.
    #[error("kernels: gemm: {0}; or use gemm = gemm, which is always there")]
    Blas(#[from] BlasError),
    /// Fused was requested and is not available.
    #[error("kernels: {name} cannot be fused: {reason}; use auto or unfused",
        name = .operation.name())]
    NotFused {
        /// The operation.
        operation: Operation,
        /// Why it is not available.
        reason: String,
    },
}

fn names() -> String {
    let names: Vec<_> = Operation::ALL
        .iter()
        .map(|operation| operation.name())
        .collect();
    names.join(", ")
}

fn engines(kinds: &[EngineKind], separator: &str) -> String {
    let names: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
    names.join(separator)
}

fn others(engine: EngineKind) -> Vec<EngineKind> {
    let mut others = EngineKind::ALL.to_vec();
    others.retain(|kind| *kind != engine);
    others
}
