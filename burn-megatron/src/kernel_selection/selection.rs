//! The selected implementations of the operations on a device, and the reasons for the selection.

use std::fmt::{self, Display};

use burn::tensor::{DType, Device};
use burn_megatron_kernels::attention::EngineKind;
use burn_megatron_kernels::gemm::{Blas, CpuGemm};

use super::{
    AttentionChoice, EpilogueFusion, EpilogueShape, KernelChoice, KernelChoiceError, KernelChoices,
    Operation, engines,
};

/// The selected implementation of one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KernelDecision {
    fused: bool,
    reason: String,
}

/// The selected implementation of every operation on a device, with the reason for each selection.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use burn_megatron::kernel_selection::{KernelChoices, KernelSelection, Operation};
///
/// let mut choices = KernelChoices::default();
/// choices.set("norm=unfused")?;
/// let kernels = KernelSelection::new(&choices, &Device::flex(), DType::F32)?;
/// assert!(!kernels.is_fused(Operation::Norm));
/// assert!(choices.set("norms=unfused").is_err());
/// # Ok::<(), burn_megatron::kernel_selection::KernelChoiceError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSelection {
    choices: KernelChoices,
    decisions: Vec<KernelDecision>,
    /// The engines of fused attention that layers use: one engine, unless the layers have different head sizes.
    engines: Vec<EngineKind>,
    /// The MLPs with epilogues, one entry per layer that was built.
    epilogues: Vec<EpilogueShape>,
    /// The library for matmuls on the CPU, or `None` for the `gemm` crate.
    blas: Option<Blas>,
}

impl KernelSelection {
    /// Selects the implementation of every operation for tensors of `dtype` on `device`.
    ///
    /// # Errors
    ///
    /// [`KernelChoiceError`] for the first request that cannot be fulfilled. For example,
    /// [`NotFused`](KernelChoiceError::NotFused) if a requested kernel is not available on the device, and
    /// [`NoChunks`](KernelChoiceError::NoChunks) if a chunk size is set without the fused loss.
    pub fn new(
        choices: &KernelChoices,
        device: &Device,
        dtype: DType,
    ) -> Result<Self, KernelChoiceError> {
        let mut selection = Self {
            choices: choices.clone(),
            decisions: vec![],
            engines: vec![],
            epilogues: vec![],
            blas: None,
        };
        for operation in Operation::ALL.iter().copied() {
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
            if selection.epilogue_fusion() && !fused {
                let reason = reason.clone();
                return Err(KernelChoiceError::UnfusedEpilogue { operation, reason });
            }
        }
        selection.blas = blas(choices.gemm, device, selection.is_fused(Operation::Linear))?;
        Ok(selection)
    }

    /// Whether MLPs use [epilogues](KernelChoices::epilogue_fusion).
    pub fn epilogue_fusion(&self) -> bool {
        self.choices.epilogue_fusion == EpilogueFusion::On
    }

    /// Sets whether MLPs use [epilogues](KernelChoices::epilogue_fusion), after both implementations were measured.
    pub fn set_epilogue_fusion(&mut self, chosen: EpilogueFusion) {
        self.choices.epilogue_fusion = chosen;
    }

    /// Returns the sizes of the MLPs with epilogues, in the order of the layers.
    pub fn epilogue_shapes(&self) -> &[EpilogueShape] {
        &self.epilogues
    }

    /// Records that an MLP with these sizes uses epilogues.
    pub fn add_epilogues(&mut self, shape: EpilogueShape) {
        self.epilogues.push(shape);
    }

    /// Whether an operation is fused.
    pub fn is_fused(&self, operation: Operation) -> bool {
        self.decisions[operation as usize].fused
    }

    /// Returns the library for matmuls on the CPU, or `None` if the `gemm` crate is used.
    pub fn blas(&self) -> Option<Blas> {
        self.blas
    }

    /// Returns the requested [chunk size](KernelChoices::loss_chunk_size) of the fused loss.
    pub fn loss_chunk_size(&self) -> Option<usize> {
        self.choices.loss_chunk_size
    }

    /// Returns the requested implementation of attention.
    pub fn attention_choice(&self) -> AttentionChoice {
        self.choices.attention
    }

    /// Returns the engines of fused attention that the layers use, in the order of the layers.
    pub fn attention_engines(&self) -> &[EngineKind] {
        &self.engines
    }

    /// Returns the reason why a layer uses the portable engine of fused attention, which does not use the tensor cores
    /// of a GPU. Returns `None` if no layer uses the portable engine, or if the user requested an engine.
    pub fn slow_attention(&self) -> Option<&str> {
        let is_slow = self.choices.attention.engine().is_none()
            && self.engines.contains(&EngineKind::Portable);
        is_slow.then(|| &self.decisions[Operation::Attention as usize].reason[..])
    }

    /// Records that a layer uses this engine of fused attention, and the reason why the engine was selected.
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

    /// Selects the unfused implementation of an operation, because the model does not support the fused implementation.
    /// `reason` describes why.
    ///
    /// # Errors
    ///
    /// [`KernelChoiceError::NotFused`] if the fused implementation was requested.
    pub fn keep_unfused(
        &mut self,
        operation: Operation,
        reason: impl Into<String>,
    ) -> Result<(), KernelChoiceError> {
        let choice = self.choices.of(operation);
        self.decisions[operation as usize] = decide(operation, choice, Some(reason.into()))?;
        Ok(())
    }

    /// Selects the unfused implementation of an operation because it is faster, if the requested implementation is
    /// `auto`.
    pub fn prefer_unfused(&mut self, operation: Operation, reason: impl Into<String>) {
        if self.choices.of(operation) == KernelChoice::Auto {
            self.decisions[operation as usize] = KernelDecision {
                fused: false,
                reason: reason.into(),
            };
        }
    }
}

/// Returns the reason why the device has no kernel for this type, or `None` if it has one.
fn missing(operation: Operation, device: &Device, dtype: DType) -> Option<String> {
    let is_cpu = *device == Device::flex();
    // The optimizer updates weights in at least f32, whatever type the model computes in.
    let dtype = match operation {
        Operation::Optimizer if dtype != DType::F64 => DType::F32,
        _ => dtype,
    };
    if !is_cpu && dtype == DType::F64 {
        return Some("kernels for GPUs compute in f32".into());
    }
    (!device.supports_dtype(dtype)).then(|| format!("the device does not support {dtype:?}"))
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

impl KernelSelection {
    /// Returns a summary in one line, without the reasons, such as `fused except softmax; attention by mma`.
    pub fn summary(&self) -> String {
        let unfused = Operation::ALL.iter().zip(&self.decisions);
        let unfused = unfused.filter(|(_, decision)| !decision.fused);
        let unfused: Vec<_> = unfused.map(|(operation, _)| operation.name()).collect();
        let mut text = match unfused.len() {
            0 => "fused".to_string(),
            number if number == Operation::ALL.len() => "unfused".to_string(),
            _ => format!("fused except {}", unfused.join(", ")),
        };
        if self.is_fused(Operation::Attention) && !self.engines.is_empty() {
            text += &format!("; attention by {}", engines(&self.engines, " and "));
        }
        if let Some(blas) = self.blas {
            text += &format!("; linear by {blas}");
        }
        text
    }
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

/// Opens the library of a choice.
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
