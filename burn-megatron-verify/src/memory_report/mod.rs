//! Measures the memory that one training step of any Burn module needs on one device, and detects memory that grows
//! from step to step.
//!
//! [`memory_report`] runs several steps and measures the memory between them. On the CPU, it measures the heap of the
//! process, which [`HeapCounter`] counts. On a GPU, it reads the usage of the CubeCL memory pool. The report also
//! contains the sizes of the parameters and of the operation outputs of each module. These sizes are computed from the
//! module and a recording of its forward.

mod growth;
pub mod heap;

use std::collections::BTreeMap;
use std::fmt;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};

use crate::devices::Batch;
use crate::devices::observed::{output_bytes, place_for_training};
use burn_megatron::text_table::Table;

pub use growth::MemoryGrowth;
pub use heap::HeapCounter;

/// The number of steps before the first measurement. They allocate memory that is needed only once, such as threads and
/// caches.
const WARMUP: usize = 2;

/// The smallest growth per step that is reported, in bytes. Maps and logs of a program usually grow by less.
const SMALLEST_GROWTH: u64 = 1024;

/// An error of [`memory_report`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryReportError {
    /// The heap is not counted, because [`HeapCounter`] is not the global allocator.
    #[error(
        "the heap is not counted: set burn_megatron_verify::memory_report::HeapCounter as the #[global_allocator] of the program"
    )]
    NotCounted,
    /// The memory pool of the device is not a CubeCL pool.
    #[error(
        "the device does not report the size of its memory pool: expected the CPU (Flex) or a CubeCL device"
    )]
    NoPool,
    /// The number of steps is less than 3.
    #[error("invalid number of steps = {0}: expected at least 3, to detect growing memory")]
    Steps(usize),
}

/// The memory of a training step, in bytes.
#[derive(Clone, Debug)]
pub struct MemoryReport {
    /// The name of the device.
    pub device: String,
    /// The path and the size in bytes of each parameter. A shared parameter is counted once.
    pub parameters: Vec<(String, u64)>,
    /// The size in bytes of the outputs of all operations in the forward, for each module. Views are included, and the
    /// module is in evaluation mode. If the forward cannot be recorded, the value is an error message.
    pub outputs: Result<BTreeMap<String, u64>, String>,
    /// The size of the gradients of all parameters, in bytes.
    pub gradients: u64,
    /// The number of bytes that the forward keeps for the backward, including the loss.
    pub kept: u64,
    /// The peak memory of the forward, minus the memory before the forward. On a GPU, it is the memory in use at the
    /// end of the forward, because the memory pool does not report a peak.
    pub forward_peak: u64,
    /// The peak memory of the backward, minus the memory before the forward. On a GPU, it is the memory in use at the
    /// end of the backward.
    pub backward_peak: u64,
    /// The number of bytes that the memory pool of the device has reserved, or `None` on the CPU.
    pub reserved: Option<u64>,
    /// The number of allocated bytes after each step, minus the number of bytes before the first measured step. The
    /// gradients of the step are dropped before the bytes are counted.
    pub after_steps: Vec<i64>,
    /// The memory that grows from step to step, or `None` if it does not grow.
    pub growth: Option<MemoryGrowth>,
}

/// Runs training steps of `model` on `device` and measures their memory. Two warmup steps are followed by `steps`
/// measured steps. `steps` must be at least 3.
///
/// `loss` computes the loss, of shape `[1]`, from the model and the batch, as in a training step. The model is not
/// changed. Other threads of the program should not allocate memory during the measurement.
///
/// # Errors
///
/// [`MemoryReportError`] if the memory cannot be measured, or if there are too few steps.
pub fn memory_report<M: Module, B: Batch>(
    model: &M,
    batch: &B,
    mut loss: impl FnMut(&M, &B) -> Tensor<1>,
    device: &Device,
    steps: usize,
) -> Result<MemoryReport, MemoryReportError> {
    if steps < 3 {
        return Err(MemoryReportError::Steps(steps));
    }
    let meter = Meter::of(device)?;
    let outputs = output_bytes(model, batch, &mut loss);
    let model = place_for_training(model, device);
    let batch = batch.on(&device.clone().autodiff(), None);
    let mut parameters = Parameters::default();
    model.visit(&mut parameters);
    let mut step = || Step::run(&meter, || loss(&model, &batch));
    for _ in 0..WARMUP {
        step();
    }
    let base = meter.live();
    let mut measured = vec![];
    let mut after_steps = Vec::with_capacity(steps);
    let noted = steps - 2;
    for number in 0..steps {
        let one = if number == noted && meter.counts_heap() {
            heap::noting(&mut step)
        } else {
            step()
        };
        // The memory of this list must not be counted as growth of the program.
        measured.clear();
        measured.push(one);
        after_steps.push(meter.live() as i64 - base as i64);
    }
    let growth = MemoryGrowth::of(&after_steps, &meter);
    let last = measured.remove(0);
    Ok(MemoryReport {
        device: format!("{device:?}"),
        gradients: parameters.trained,
        parameters: parameters.found,
        outputs,
        kept: last.kept,
        forward_peak: last.forward_peak,
        backward_peak: last.backward_peak,
        reserved: meter.reserved(),
        after_steps,
        growth,
    })
}

/// The source from which the bytes in use are read.
pub(super) enum Meter {
    Heap,
    Pool(Device),
}

impl Meter {
    fn of(device: &Device) -> Result<Self, MemoryReportError> {
        let device = device.clone().without_autodiff();
        if device == Device::flex() {
            let is_counted = heap::live() > 0;
            return is_counted
                .then_some(Self::Heap)
                .ok_or(MemoryReportError::NotCounted);
        }
        let has_pool = device.memory_pool_usage().is_some();
        has_pool
            .then_some(Self::Pool(device))
            .ok_or(MemoryReportError::NoPool)
    }

    fn counts_heap(&self) -> bool {
        matches!(self, Self::Heap)
    }

    fn live(&self) -> u64 {
        match self {
            Self::Heap => heap::live() as u64,
            Self::Pool(device) => {
                // The queue is empty after the sync. An error of the device is returned by the next read.
                let _ = device.sync();
                device
                    .memory_pool_usage()
                    .map_or(0, |usage| usage.bytes_in_use)
            }
        }
    }

    /// Returns the peak number of bytes since the last call. For a memory pool, returns the number of bytes in use.
    fn peak(&self) -> u64 {
        match self {
            Self::Heap => {
                let peak = heap::peak() as u64;
                heap::reset_peak();
                peak
            }
            Self::Pool(_) => self.live(),
        }
    }

    fn reserved(&self) -> Option<u64> {
        match self {
            Self::Heap => None,
            Self::Pool(device) => device.memory_pool_usage().map(|usage| usage.bytes_reserved),
        }
    }
}

struct Step {
    kept: u64,
    forward_peak: u64,
    backward_peak: u64,
}

impl Step {
    fn run(meter: &Meter, forward: impl FnOnce() -> Tensor<1>) -> Self {
        let before = meter.live();
        meter.peak();
        let loss = forward();
        let kept = meter.live().saturating_sub(before);
        let forward_peak = meter.peak().saturating_sub(before);
        let gradients = loss.is_tracked().then(|| loss.backward());
        let backward_peak = meter.peak().saturating_sub(before);
        drop(gradients);
        Self {
            kept,
            forward_peak,
            backward_peak,
        }
    }
}

/// Collects the bytes of parameters.
#[derive(Default)]
struct Parameters {
    path: Vec<String>,
    seen: Vec<burn::module::ParamId>,
    found: Vec<(String, u64)>,
    trained: u64,
}

impl ModuleVisitor for Parameters {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.seen.contains(&param.id) {
            return;
        }
        self.seen.push(param.id);
        let tensor = param.base();
        let bytes = (tensor.shape().num_elements() * tensor.dtype().size()) as u64;
        if tensor.is_require_grad() {
            self.trained += bytes;
        }
        self.found.push((self.path.join("."), bytes));
    }
}

impl MemoryReport {
    /// Returns two sizes in bytes for each module: the size of its parameters, without the parameters of its
    /// submodules, and the size of the outputs of its operations.
    pub fn by_module(&self) -> BTreeMap<String, [u64; 2]> {
        let mut modules: BTreeMap<String, [u64; 2]> = BTreeMap::new();
        for (path, bytes) in &self.parameters {
            let module = path.rsplit_once('.').map_or("", |(module, _)| module);
            modules.entry(module.into()).or_default()[0] += bytes;
        }
        for (module, bytes) in self.outputs.iter().flatten() {
            modules.entry(module.clone()).or_default()[1] += bytes;
        }
        modules
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters: u64 = self.parameters.iter().map(|(_, bytes)| bytes).sum();
        writeln!(f, "{}, bytes of a step:", self.device)?;
        let mut rows = vec![
            ("parameters", parameters),
            ("gradients", self.gradients),
            ("kept for the backward", self.kept),
            ("peak of the forward", self.forward_peak),
            ("peak of the backward", self.backward_peak),
        ];
        rows.extend(self.reserved.map(|bytes| ("reserved on the device", bytes)));
        let rows = rows
            .into_iter()
            .map(|(name, bytes)| vec![name.to_string(), bytes.to_string()]);
        writeln!(f, "{}", Table::new(rows).with_left([0]).fit(None))?;
        let header = ["module", "parameters", "outputs"]
            .map(String::from)
            .to_vec();
        let modules = self
            .by_module()
            .into_iter()
            .map(|(module, [own, outputs])| {
                let name = if module.is_empty() {
                    "(outside)".into()
                } else {
                    module
                };
                vec![name, own.to_string(), outputs.to_string()]
            });
        let rows = std::iter::once(header).chain(modules);
        writeln!(f, "{}", Table::new(rows).with_left([0]).fit(None))?;
        if let Err(reason) = &self.outputs {
            writeln!(f, "outputs are not known: {reason}")?;
        }
        match &self.growth {
            Some(growth) => write!(f, "{growth}"),
            None => writeln!(f, "nothing stays from step to step"),
        }
    }
}
