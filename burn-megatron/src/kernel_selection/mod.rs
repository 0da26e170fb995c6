//! Selects fused kernels.
//!
//! Every operation of the [kernels crate](crate::kernels) has two equivalent implementations: a fused kernel with its
//! own backward, and a composition of Burn's operations. [`KernelChoices`] holds the implementations that the user
//! requests. [`KernelSelection`] holds the implementations that are used for a device and a data type.

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

/// An operation that has a fused and an unfused implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Operation {
    /// LayerNorm and RMSNorm, including the residual addition.
    Norm,
    /// The activation function of the MLP, including the addition of the bias.
    Activation,
    /// Bias, dropout and residual addition.
    Dropout,
    /// Rotary position embeddings.
    Rope,
    /// Flash attention: computes scores, softmax and weighted sum without storing the scores in memory.
    Attention,
    /// Scale, mask and softmax of the attention scores, if attention is not fused.
    Softmax,
    /// Cross entropy.
    Loss,
    /// The matmuls of linear layers. The fused implementation also adds the bias and accumulates the weight gradients.
    Linear,
    /// AdamW, and the sum of squares that the gradient norm needs.
    Optimizer,
}

impl Operation {
    /// All operations, in the order in which a step runs them.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Returns the name that recipes and flags use.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The requested implementation of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[derive(EnumString, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
#[strum(parse_err_ty = KernelChoiceError, parse_err_fn = unknown_choice)]
pub enum KernelChoice {
    /// Uses the fused implementation if the device has the kernel and the fused implementation is faster.
    #[default]
    Auto,
    /// Uses the fused implementation. An error is returned if the kernel is not available.
    Fused,
    /// Uses the unfused implementation, which is composed of Burn's operations.
    Unfused,
}

/// The names of the settings that are not operations.
const EPILOGUE_FUSION: &str = "epilogue_fusion";
const GEMM_ALGORITHMS: &str = "gemm_algorithms";

/// The requested implementation of each operation, and other settings of kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KernelChoices {
    /// The implementation of LayerNorm and RMSNorm, including the residual addition.
    pub norm: KernelChoice,
    /// The implementation of the activation function of the MLP, including the addition of the bias.
    pub activation: KernelChoice,
    /// The implementation of the bias, the dropout and the residual addition.
    pub dropout: KernelChoice,
    /// The implementation of rotary position embeddings.
    pub rope: KernelChoice,
    /// The implementation of attention, or the engine of fused attention.
    pub attention: AttentionChoice,
    /// The implementation of the scale, mask and softmax of attention scores, if attention is not fused.
    pub softmax: KernelChoice,
    /// The implementation of cross entropy.
    pub loss: KernelChoice,
    /// The chunk size of the fused loss: the number of tokens whose logits are in memory at the same time. 0 means all
    /// tokens of a micro-batch. By default the logits of a chunk use at most [1
    /// GiB](crate::nn::LogitsShape::tokens_per_chunk).
    pub loss_chunk_size: Option<usize>,
    /// The implementation of the matmuls of linear layers. The fused implementation also adds the bias and accumulates
    /// the weight gradients.
    pub linear: KernelChoice,
    /// The library for fused matmuls on the CPU, except the matmuls of experts.
    #[schemars(with = "String", extend("enum" = CpuGemm::ALL.map(CpuGemm::name)))]
    pub gemm: CpuGemm,
    /// Whether the GELU (tanh) of an MLP, its derivative and the gradient of its bias are computed as
    /// [epilogues](crate::kernels::gemm::gelu) of the matmuls before and after it. Requires CUDA. With
    /// [`true`](EpilogueFusion::On), an error is returned if epilogues are not supported.
    pub epilogue_fusion: EpilogueFusion,
    /// A file with cuBLASLt algorithms that `burn-megatron-bench gemm --tune` has written. Rank 0 reads the file for
    /// all ranks. By default the cuBLASLt heuristic selects the algorithms. Requires CUDA.
    #[schemars(extend("value" = "PATH", "experimental" = true))]
    pub gemm_algorithms: Option<PathBuf>,
    /// The implementation of AdamW and the gradient norm.
    pub optimizer: KernelChoice,
}

impl KernelChoices {
    /// Requests the same implementation for every operation.
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

    /// Checks that the device supports the requested epilogues, before a model is built on the device.
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

    /// Checks that no implementation has to be measured. Call it in programs that do not run the measurement.
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

    /// Returns the requested implementation of an operation.
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

    /// Sets the requested implementation of an operation.
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

    /// Parses and sets the requested implementations. `text` is `fused`, `unfused` or `auto` for all operations, or a
    /// list such as `norm=unfused,attention=portable,epilogue_fusion=true`.
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
    /// Returns the name that recipes and flags use.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

fn unknown_choice(text: &str) -> KernelChoiceError {
    KernelChoiceError::UnknownChoice(text.into())
}

/// An invalid kernel setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelChoiceError {
    /// The name of an operation is unknown.
    #[error("invalid operation \"{0}\": expected {names}", names = names())]
    UnknownOperation(String),
    /// The name of an implementation is unknown.
    #[error("invalid kernel choice \"{0}\": expected auto, fused or unfused")]
    UnknownChoice(String),
    /// The name of an implementation or an engine of attention is unknown.
    #[error("invalid kernel choice \"{0}\" of attention: expected auto, fused, unfused, {engines}",
        engines = engines(&EngineKind::ALL, " or "))]
    UnknownAttentionChoice(String),
    /// The value of `epilogue_fusion` is unknown.
    #[error("invalid epilogue_fusion \"{0}\": expected true, false or measured")]
    InvalidEpilogueFusion(String),
    /// Epilogues were requested, but an operation that they require is not fused.
    #[error(
        "kernels: epilogue_fusion requires fused {name}, but {name} is unfused ({reason}): set {name} = fused, or \
         remove epilogue_fusion",
        name = .operation.name()
    )]
    UnfusedEpilogue {
        /// The operation.
        operation: Operation,
        /// The reason why the operation is not fused.
        reason: String,
    },
    /// `epilogue_fusion` is `"measured"`, but this program does not run the measurement.
    #[error(
        "kernels: epilogue_fusion = \"measured\" requires pretrain, which measures it: use true or false here"
    )]
    NotMeasured,
    /// Epilogues were requested for a device or a dtype that does not support them.
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
        /// The reason why the engine is not available.
        reason: String,
    },
    /// The name of the library for matmuls is unknown.
    #[error(transparent)]
    UnknownGemm(#[from] UnknownCpuGemm),
    /// The requested library does not support the matmuls of this model or device.
    #[error("kernels: gemm = {gemm} requires {needed}: use gemm = gemm, or {fits}")]
    NoBlas {
        /// The library.
        gemm: CpuGemm,
        /// The missing requirement.
        needed: &'static str,
        /// The values that are valid instead.
        fits: &'static str,
    },
    /// The library for matmuls cannot be opened.
    #[error("kernels: gemm: {0}; or use gemm = gemm, which is always available")]
    Blas(#[from] BlasError),
    /// The fused implementation of an operation was requested but is not available.
    #[error("kernels: {name} cannot be fused: {reason}; use auto or unfused",
        name = .operation.name())]
    NotFused {
        /// The operation.
        operation: Operation,
        /// The reason why the fused implementation is not available.
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
