//! Selection of fused kernels.
//!
//! Every operation of the [kernels crate](crate::kernels) has two equivalent forms: a fused kernel with its own
//! backward, and a composition of Burn's operations. [`KernelChoices`] holds the forms that the user requests.
//! [`KernelSelection`] holds the forms that are used for a device and a data type.

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
    /// The activation function of the MLP with its bias.
    Activation,
    /// Bias, dropout and residual addition.
    Dropout,
    /// Rotary position embeddings.
    Rope,
    /// Flash attention: scores, softmax and weighted sum, without the scores in memory.
    Attention,
    /// Scale, mask and softmax of scores, if attention is not fused.
    Softmax,
    /// Cross entropy.
    Loss,
    /// Matrix products that also add the bias and accumulate weight gradients.
    Linear,
    /// AdamW, and the sum of squares for the gradient norm.
    Optimizer,
}

impl Operation {
    /// All operations, in the order of a step.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Returns the name in recipes and flags.
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
    /// Fused. It is an error if the kernel is not available.
    Fused,
    /// Burn's operations.
    Unfused,
}

/// The names of the settings that are not operations.
const EPILOGUE_FUSION: &str = "epilogue_fusion";
const GEMM_ALGORITHMS: &str = "gemm_algorithms";

/// The requested form of each operation, and further kernel settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KernelChoices {
    /// The form of LayerNorm and RMSNorm with the residual addition.
    pub norm: KernelChoice,
    /// The form of the MLP's activation with its bias.
    pub activation: KernelChoice,
    /// The form of bias, dropout and residual addition.
    pub dropout: KernelChoice,
    /// The form of rotary position embeddings.
    pub rope: KernelChoice,
    /// The form of attention, or the engine of fused attention.
    pub attention: AttentionChoice,
    /// The form of the scale, mask and softmax of attention scores, if attention is not fused.
    pub softmax: KernelChoice,
    /// The form of cross entropy.
    pub loss: KernelChoice,
    /// The number of tokens whose logits are in memory at once, if the loss is fused; 0 for all tokens of a
    /// micro-batch. By default the logits of a chunk use at most [1
    /// GiB](crate::nn::LogitsShape::tokens_per_chunk).
    pub loss_chunk_size: Option<usize>,
    /// The form of matrix products. The fused form also adds the bias and accumulates weight gradients.
    pub linear: KernelChoice,
    /// The library for fused matrix products on the CPU, except the products of experts.
    #[schemars(with = "String", extend("enum" = CpuGemm::ALL.map(CpuGemm::name)))]
    pub gemm: CpuGemm,
    /// Whether GELU (tanh) of an MLP, its derivative and the gradient of its bias are
    /// [epilogues](crate::kernels::gemm::gelu) of the matrix products around it. Requires CUDA.
    /// [`true`](EpilogueFusion::On) is an error where epilogues are not supported.
    pub epilogue_fusion: EpilogueFusion,
    /// The file of cuBLASLt algorithms that `burn-megatron-bench gemm --tune` has written. Rank 0 reads it for
    /// all ranks. By default the cuBLASLt heuristic selects the algorithms. Requires CUDA.
    #[schemars(extend("value" = "PATH", "experimental" = true))]
    pub gemm_algorithms: Option<PathBuf>,
    /// The form of AdamW and the gradient norm.
    pub optimizer: KernelChoice,
}

impl KernelChoices {
    /// Returns the same choice for every operation.
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

    /// Checks that the device supports the requested epilogues, before a model is built on it.
    ///
    /// # Errors
    ///
    /// [`KernelChoiceError::NoEpilogues`] if epilogues are requested and the device or `dtype` does not support
    /// them.
    pub fn check_epilogues(&self, device: &Device, dtype: DType) -> Result<(), KernelChoiceError> {
        if self.epilogue_fusion != EpilogueFusion::On {
            return Ok(());
        }
        // Any sizes work here: the sizes of the model are checked where it is built.
        let checked = check_gelu_epilogues(device, dtype, [64, 64]);
        checked.map_err(KernelChoiceError::NoEpilogues)
    }

    /// Checks that no choice is left to a measurement, for programs that do not measure.
    ///
    /// # Errors
    ///
    /// [`KernelChoiceError::NotMeasured`] if `epilogue_fusion` is `"measured"`.
    pub fn check_measured(&self) -> Result<(), KernelChoiceError> {
        match self.epilogue_fusion {
            EpilogueFusion::Off | EpilogueFusion::On => Ok(()),
            EpilogueFusion::Measured => Err(KernelChoiceError::NotMeasured),
        }
    }

    /// Returns the choice for an operation.
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

    /// Sets the choice for an operation.
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

    /// Sets choices from text: `fused`, `unfused`, `auto`, or a list such as
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
    /// Returns the name in recipes and flags.
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
    /// Epilogues were requested for operations that are not fused.
    #[error(
        "kernels: epilogue_fusion requires fused {name}, but {name} is unfused ({reason}): set {name} = fused, or \
         remove epilogue_fusion",
        name = .operation.name()
    )]
    UnfusedEpilogue {
        /// The operation.
        operation: Operation,
        /// The reason why it is not fused.
        reason: String,
    },
    /// A choice was left to a measurement, which this program does not make.
    #[error(
        "kernels: epilogue_fusion = \"measured\" requires pretrain, which measures it: use true or false here"
    )]
    NotMeasured,
    /// Epilogues were requested for a device or a type that does not support them.
    #[error("kernels: epilogue_fusion cannot be used: {0}; remove epilogue_fusion")]
    NoEpilogues(String),
    /// The chunk size of the fused loss was set, but the loss is not fused.
    #[error(
        "kernels: loss_chunk_size = {chunk_size} requires the fused loss, but loss is unfused ({reason}): remove \
         loss_chunk_size, or set loss = fused"
    )]
    NoChunks {
        /// The requested chunk size.
        chunk_size: usize,
        /// The reason why the loss is not fused.
        reason: String,
    },
    /// The requested attention engine is not available.
    #[error("kernels: attention cannot use {reason}; use auto or {others}",
        others = engines(&others(*.engine), " or "))]
    NoEngine {
        /// The engine.
        engine: EngineKind,
        /// The engine and the reason why it is not available.
        reason: String,
    },
    /// An unknown library for matrix products.
    #[error(transparent)]
    UnknownGemm(#[from] UnknownCpuGemm),
    /// The requested library does not support these matrix products.
    #[error("kernels: gemm = {gemm} requires {needed}: use gemm = gemm, or {fits}")]
    NoBlas {
        /// The library.
        gemm: CpuGemm,
        /// The missing requirement.
        needed: &'static str,
        /// The values that would be valid.
        fits: &'static str,
    },
    /// The library cannot be opened.
    #[error("kernels: gemm: {0}; or use gemm = gemm, which is always available")]
    Blas(#[from] BlasError),
    /// The fused form was requested but is not available.
    #[error("kernels: {name} cannot be fused: {reason}; use auto or unfused",
        name = .operation.name())]
    NotFused {
        /// The operation.
        operation: Operation,
        /// The reason why it is not available.
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
