//! Selection of fused kernels.
//!
//! Every operation of the [kernels crate](crate::kernels) has two forms that compute the same: a
//! fused kernel with its own backward, and a composition of Burn's operations. [`KernelChoices`] is what the
//! user requests, [`KernelSelection`] what is used on a device with a type.

use std::fmt::{self, Display};
use std::path::PathBuf;
use std::str::FromStr;

use burn::tensor::{DType, Device};
use burn_megatron_kernels::attention::EngineKind;
use burn_megatron_kernels::gemm::gelu::check_gelu_epilogues;
use burn_megatron_kernels::gemm::{Blas, BlasError, CpuGemm, UnknownCpuGemm};
use serde::{Deserialize, Serialize};

mod attention;
#[cfg(test)]
mod tests;

pub use attention::AttentionChoice;

/// An operation with a fused and an unfused form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
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
    pub const ALL: [Self; 9] = [
        Self::Norm,
        Self::Activation,
        Self::Dropout,
        Self::Rope,
        Self::Attention,
        Self::Softmax,
        Self::Loss,
        Self::Linear,
        Self::Optimizer,
    ];

    /// The name in recipes and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Norm => "norm",
            Self::Activation => "activation",
            Self::Dropout => "dropout",
            Self::Rope => "rope",
            Self::Attention => "attention",
            Self::Softmax => "softmax",
            Self::Loss => "loss",
            Self::Linear => "linear",
            Self::Optimizer => "optimizer",
        }
    }
}

/// The requested form of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KernelChoices {
    /// See [`Operation::Norm`].
    pub norm: KernelChoice,
    /// See [`Operation::Activation`].
    pub activation: KernelChoice,
    /// See [`Operation::Dropout`].
    pub dropout: KernelChoice,
    /// See [`Operation::Rope`].
    pub rope: KernelChoice,
    /// See [`Operation::Attention`].
    pub attention: AttentionChoice,
    /// See [`Operation::Softmax`].
    pub softmax: KernelChoice,
    /// See [`Operation::Loss`].
    pub loss: KernelChoice,
    /// The tokens whose logits are in memory at once, if the loss is fused: see
    /// [`LogitsShape::tokens_per_chunk`](crate::nn::LogitsShape::tokens_per_chunk).
    pub loss_chunk_size: Option<usize>,
    /// See [`Operation::Linear`].
    pub linear: KernelChoice,
    /// What computes fused products of matrices on the CPU, but those of experts.
    pub gemm: CpuGemm,
    /// Whether GELU (tanh) of an MLP, its derivative and the gradient of its bias are epilogues of the products around
    /// it: see [`gemm::gelu`](crate::kernels::gemm::gelu). For CUDA; an error where it cannot be.
    pub epilogue_fusion: bool,
    /// The file of algorithms of cuBLASLt that `bench gemm --tune` has written, which rank 0 reads for all ranks; by
    /// default those of its heuristic are used. For CUDA.
    pub gemm_algorithms: Option<PathBuf>,
    /// See [`Operation::Optimizer`].
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
            self.choose(operation, choice);
        }
    }

    /// Checks that the device has the epilogues that are requested, before a model is built on it.
    ///
    /// # Errors
    ///
    /// [`KernelChoiceError::NoEpilogues`].
    pub fn check_epilogues(&self, device: &Device, dtype: DType) -> Result<(), KernelChoiceError> {
        if !self.epilogue_fusion {
            return Ok(());
        }
        // Any sizes; those of the model are checked where it is built.
        let checked = check_gelu_epilogues(device, dtype, [64, 64]);
        checked.map_err(KernelChoiceError::NoEpilogues)
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
                Some((EPILOGUE_FUSION, value)) => {
                    let invalid = |_| KernelChoiceError::InvalidEpilogueFusion(value.into());
                    self.epilogue_fusion = value.parse().map_err(invalid)?;
                }
                Some((name, choice)) => {
                    let operation = Operation::ALL.into_iter().find(|o| o.name() == name);
                    let operation = operation
                        .ok_or_else(|| KernelChoiceError::UnknownOperation(name.into()))?;
                    match operation {
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
        match self {
            Self::Auto => "auto",
            Self::Fused => "fused",
            Self::Unfused => "unfused",
        }
    }
}

impl FromStr for KernelChoice {
    type Err = KernelChoiceError;

    fn from_str(text: &str) -> Result<Self, KernelChoiceError> {
        match text {
            "auto" => Ok(Self::Auto),
            "fused" => Ok(Self::Fused),
            "unfused" => Ok(Self::Unfused),
            other => Err(KernelChoiceError::UnknownChoice(other.into())),
        }
    }
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
    /// Neither `true` nor `false`.
    #[error("invalid epilogue_fusion \"{0}\": expected true or false")]
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
        /// What is missing.
        needed: &'static str,
        /// What would fit.
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

/// The library of a choice, opened.
fn blas(gemm: CpuGemm, device: &Device, is_fused: bool) -> Result<Option<Blas>, KernelChoiceError> {
    if gemm == CpuGemm::Crate {
        return Ok(None);
    }
    let refused = |needed, fits| KernelChoiceError::NoBlas { gemm, needed, fits };
    if *device != Device::flex() {
        return Err(refused("the CPU", "device = cpu"));
    }
    if !is_fused {
        let needed = "fused products, and linear is unfused";
        return Err(refused(needed, "linear = fused"));
    }
    Ok(gemm.open()?)
}

fn names() -> String {
    Operation::ALL.map(Operation::name).join(", ")
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

/// The selected form of one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KernelDecision {
    fused: bool,
    reason: String,
}

/// The selected form of every operation on a device, with the reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSelection {
    choices: KernelChoices,
    decisions: Vec<KernelDecision>,
    /// The engines of fused attention that layers have selected: one, unless layers have different heads.
    engines: Vec<EngineKind>,
    /// What multiplies on the CPU, if not the `gemm` crate.
    blas: Option<Blas>,
}

impl KernelSelection {
    /// Selects the forms for tensors of `dtype` on `device`.
    ///
    /// # Errors
    ///
    /// [`KernelChoiceError::NotFused`] if a requested kernel is not available on the device;
    /// [`KernelChoiceError::NoChunks`].
    pub fn new(
        choices: &KernelChoices,
        device: &Device,
        dtype: DType,
    ) -> Result<Self, KernelChoiceError> {
        let mut selection = Self {
            choices: choices.clone(),
            decisions: vec![],
            engines: vec![],
            blas: None,
        };
        for operation in Operation::ALL {
            let missing = missing(operation, device, dtype);
            let decision = decide(operation, choices.of(operation), missing)?;
            selection.decisions.push(decision);
        }
        let loss = &selection.decisions[Operation::Loss as usize];
        if let Some(chunk_size) = choices.loss_chunk_size.filter(|_| !loss.fused) {
            let reason = loss.reason.clone();
            return Err(KernelChoiceError::NoChunks { chunk_size, reason });
        }
        for operation in [Operation::Linear, Operation::Activation] {
            let KernelDecision { fused, reason } = &selection.decisions[operation as usize];
            if choices.epilogue_fusion && !fused {
                let reason = reason.clone();
                return Err(KernelChoiceError::UnfusedEpilogue { operation, reason });
            }
        }
        selection.blas = blas(choices.gemm, device, selection.is_fused(Operation::Linear))?;
        Ok(selection)
    }

    /// See [`KernelChoices::epilogue_fusion`].
    pub fn epilogue_fusion(&self) -> bool {
        self.choices.epilogue_fusion
    }

    /// Whether an operation is fused.
    pub fn is_fused(&self, operation: Operation) -> bool {
        self.decisions[operation as usize].fused
    }

    /// What multiplies on the CPU, if not the `gemm` crate.
    pub fn blas(&self) -> Option<Blas> {
        self.blas
    }

    /// See [`KernelChoices::loss_chunk_size`].
    pub fn loss_chunk_size(&self) -> Option<usize> {
        self.choices.loss_chunk_size
    }

    /// The requested form of attention.
    pub fn attention_choice(&self) -> AttentionChoice {
        self.choices.attention
    }

    /// The engines of fused attention that the layers use, in the order of the layers.
    pub fn attention_engines(&self) -> &[EngineKind] {
        &self.engines
    }

    /// Adds an engine that fused attention uses, with the reason.
    pub fn add_attention_engine(&mut self, engine: EngineKind, reason: impl Into<String>) {
        let own = &mut self.decisions[Operation::Attention as usize].reason;
        if self.engines.is_empty() {
            *own = reason.into();
        } else if !self.engines.contains(&engine) {
            *own = format!("{own}; {}", reason.into());
        } else {
            return;
        }
        self.engines.push(engine);
    }

    /// Disables the fused form of an operation that the model does not allow, for this reason.
    ///
    /// # Errors
    ///
    /// [`KernelChoiceError::NotFused`] if the kernel was requested.
    pub fn keep_unfused(
        &mut self,
        operation: Operation,
        reason: impl Into<String>,
    ) -> Result<(), KernelChoiceError> {
        let choice = self.choices.of(operation);
        self.decisions[operation as usize] = decide(operation, choice, Some(reason.into()))?;
        Ok(())
    }

    /// Disables the fused form of an operation that is faster unfused, if the choice is automatic.
    pub fn prefer_unfused(&mut self, operation: Operation, reason: impl Into<String>) {
        if self.choices.of(operation) == KernelChoice::Auto {
            self.decisions[operation as usize] = KernelDecision {
                fused: false,
                reason: reason.into(),
            };
        }
    }
}

/// Why the device has no kernel for this type, if it has none.
fn missing(operation: Operation, device: &Device, dtype: DType) -> Option<String> {
    let is_cpu = *device == Device::flex();
    // The optimizer steps weights in f32 at least, whatever type the model computes in.
    let dtype = match operation {
        Operation::Optimizer if dtype != DType::F64 => DType::F32,
        _ => dtype,
    };
    if !is_cpu && dtype == DType::F64 {
        return Some("kernels for GPUs compute in f32".into());
    }
    (!device.supports_dtype(dtype)).then(|| format!("the device has no {dtype:?}"))
}

fn decide(
    operation: Operation,
    choice: KernelChoice,
    obstacle: Option<String>,
) -> Result<KernelDecision, KernelChoiceError> {
    let (fused, reason) = match (choice, obstacle) {
        (KernelChoice::Unfused, _) => (false, "requested".into()),
        (KernelChoice::Fused, None) => (true, "requested".into()),
        (KernelChoice::Auto, None) => (true, "the device has the kernel".into()),
        (KernelChoice::Auto, Some(reason)) => (false, reason),
        (KernelChoice::Fused, Some(reason)) => {
            return Err(KernelChoiceError::NotFused { operation, reason });
        }
    };
    Ok(KernelDecision { fused, reason })
}

/// `fused: norm, loss (the device has the kernel); fused: attention by mma (..); unfused: softmax (..)`
impl Display for KernelSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut groups: Vec<(&KernelDecision, Vec<String>)> = vec![];
        for (operation, decision) in Operation::ALL.iter().zip(&self.decisions) {
            let name = match operation {
                Operation::Attention if decision.fused && !self.engines.is_empty() => {
                    format!("attention by {}", engines(&self.engines, " and "))
                }
                Operation::Linear if let Some(blas) = self.blas => format!("linear by {blas}"),
                Operation::Activation if self.epilogue_fusion() => {
                    "activation as epilogues of cuBLASLt".into()
                }
                other => other.name().into(),
            };
            match groups.iter_mut().find(|(other, _)| *other == decision) {
                Some((_, names)) => names.push(name),
                None => groups.push((decision, vec![name])),
            }
        }
        groups.sort_by_key(|(decision, _)| !decision.fused);
        for (i, (decision, names)) in groups.iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            let form = if decision.fused { "fused" } else { "unfused" };
            let names = names.join(", ");
            write!(f, "{separator}{form}: {names} ({})", decision.reason)?;
        }
        Ok(())
    }
}
