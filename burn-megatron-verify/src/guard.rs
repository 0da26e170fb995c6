//! Checks a training loop while it runs.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::vec;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use burn_megatron::collective::Comm;
use burn_megatron::comm::CommError;
use burn_megatron::data_parallel::running_states;

/// Options of a [`Guard`], which select checks in addition to the check for gradients that are not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuardConfig {
    /// The interval of the repetition check, in steps: the gradients are computed a second time and compared bit for
    /// bit. 0 disables the check.
    pub repeat_every: u64,
    /// The interval of the replica check, in steps: after the optimizer step, the parameters of all ranks are compared
    /// bit for bit. 0 disables the check.
    pub replicas_every: u64,
}

/// An error that a [`Guard`] detects in a training step. All ranks return the same error.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// A gradient is not finite.
    #[error("step {step}: the gradient of {path} on rank {rank} is not finite")]
    NotFinite {
        /// The number of the step, from 1.
        step: u64,
        /// The path of the first parameter with a gradient that is not finite, in the order of the module.
        path: String,
        /// The first rank that has a gradient that is not finite.
        rank: usize,
    },
    /// A second computation of the gradients gave different results.
    #[error(
        "step {step}: computed twice, the gradient of {path} on rank {rank} differs. Randomness such as dropout must be the same \
         both times"
    )]
    NotRepeatable {
        /// The number of the step, from 1.
        step: u64,
        /// The path of the first parameter that differs.
        path: String,
        /// The first rank on which the gradients differ.
        rank: usize,
    },
    /// The parameters differ between the ranks.
    #[error(
        "step {step}: {path} differs between rank 0 and rank {rank}: replicas must hold the same bits"
    )]
    Replicas {
        /// The number of the step, from 1.
        step: u64,
        /// The path of the first parameter that differs.
        path: String,
        /// The first rank that differs from rank 0.
        rank: usize,
    },
    /// The ranks have modules with different numbers of parameters.
    #[error(
        "rank {rank} has {found} parameters, and rank 0 has {expected}: expected replicas of one module"
    )]
    Modules {
        /// The index of the rank.
        rank: usize,
        /// The number of parameters of the rank.
        found: usize,
        /// The number of parameters of rank 0.
        expected: usize,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Checks the steps of any training loop, on one rank or on data-parallel replicas. Call [`gradients`](Self::gradients)
/// between the backward and the optimizer step, and [`stepped`](Self::stepped) after the optimizer step.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use burn::optim::{GradientsParams, SgdConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_verify::{Guard, GuardConfig};
///
/// let device = Device::flex().autodiff();
/// let mut model = LinearConfig::new(2, 1).init(&device);
/// let mut optimizer = SgdConfig::new().init();
/// let mut guard = Guard::new(GuardConfig { repeat_every: 2, ..GuardConfig::default() });
/// for _ in 0..4 {
///     let gradients = |model: &burn::nn::Linear| {
///         let loss = model.forward(Tensor::<2>::ones([3, 2], &device)).sum();
///         GradientsParams::from_grads(loss.backward(), model)
///     };
///     let step = gradients(&model);
///     guard.gradients(&model, &step, || gradients(&model))?;
///     model = optimizer.step(0.1, model, step);
///     guard.stepped(&model)?;
/// }
/// # Ok::<(), burn_megatron_verify::GuardError>(())
/// ```
#[derive(Debug)]
pub struct Guard {
    config: GuardConfig,
    ranks: Option<Comm>,
    /// The number of steps whose gradients were checked.
    step: u64,
}

/// The value that means no parameter.
const NONE: i64 = -1;

impl Guard {
    /// Creates a guard for one rank.
    pub fn new(config: GuardConfig) -> Self {
        Self {
            config,
            ranks: None,
            step: 0,
        }
    }

    /// Creates a guard for data-parallel replicas, one on each rank of `ranks`. The methods of the guard are
    /// collective: all ranks must call them, and all ranks get the same result.
    pub fn of_ranks(config: GuardConfig, ranks: Comm) -> Self {
        Self {
            ranks: Some(ranks),
            ..Self::new(config)
        }
    }

    /// Sets the step counter when a run is resumed. `step` is the last completed step.
    pub fn resume(&mut self, step: u64) {
        self.step = step;
    }

    /// Checks the gradients of a step, before the optimizer step. `again` computes the gradients a second time. It is
    /// called only in the steps that [`GuardConfig::repeat_every`] selects. This method waits until the device has
    /// computed the gradients.
    ///
    /// # Errors
    ///
    /// [`GuardError::NotFinite`] if a gradient is not finite, [`GuardError::NotRepeatable`] if the second computation
    /// gives different gradients, and [`GuardError::Comm`] if a collective fails.
    pub fn gradients<M: Module>(
        &mut self,
        model: &M,
        gradients: &GradientsParams,
        again: impl FnOnce() -> GradientsParams,
    ) -> Result<(), GuardError> {
        self.step += 1;
        let step = self.step;
        let seen = Fingerprints::of_gradients(model, gradients);
        let wrong = seen.all.iter().position(|it| !it.finite);
        if let Some((rank, path)) = self.first(wrong, &seen.paths)? {
            return Err(GuardError::NotFinite { step, path, rank });
        }
        if !due(self.config.repeat_every, step) {
            return Ok(());
        }
        let again = again();
        let again = Fingerprints::of_gradients(model, &again);
        let pairs = seen.all.iter().zip(&again.all);
        let wrong = pairs
            .map(|(a, b)| a.hash != b.hash)
            .position(|differs| differs);
        match self.first(wrong, &seen.paths)? {
            Some((rank, path)) => Err(GuardError::NotRepeatable { step, path, rank }),
            None => Ok(()),
        }
    }

    /// Checks that the parameters are equal on all ranks, after the optimizer step. In the steps that
    /// [`GuardConfig::replicas_every`] selects, this method waits until the device has computed the parameters.
    ///
    /// # Errors
    ///
    /// [`GuardError::Replicas`] if parameters differ, [`GuardError::Modules`] if the ranks have different numbers of
    /// parameters, and [`GuardError::Comm`] if a collective fails.
    pub fn stepped<M: Module>(&self, model: &M) -> Result<(), GuardError> {
        let Some(ranks) = self
            .ranks
            .as_ref()
            .filter(|_| due(self.config.replicas_every, self.step))
        else {
            return Ok(());
        };
        let own = Fingerprints::of_parameters(model);
        let counts: Vec<i64> = ranks
            .all_gather(vec![own.all.len() as i64].into())?
            .into_vec();
        let expected = counts[0] as usize;
        if let Some(rank) = counts.iter().position(|count| *count != counts[0]) {
            let found = counts[rank] as usize;
            return Err(GuardError::Modules {
                rank,
                found,
                expected,
            });
        }
        if expected == 0 {
            return Ok(());
        }
        let hashes: Vec<i64> = own.all.iter().map(|it| it.hash).collect();
        let all: Vec<i64> = ranks.all_gather(hashes.into())?.into_vec();
        let first = &all[..expected];
        for (rank, other) in all.chunks(expected).enumerate() {
            if let Some(at) = other.iter().zip(first).position(|(a, b)| a != b) {
                let (step, path) = (self.step, own.paths[at].clone());
                return Err(GuardError::Replicas { step, path, rank });
            }
        }
        Ok(())
    }

    /// Returns the first rank on which a parameter is invalid, and the path of this parameter in the module of this
    /// rank.
    fn first(
        &self,
        own: Option<usize>,
        paths: &[String],
    ) -> Result<Option<(usize, String)>, GuardError> {
        let own = own.map_or(NONE, |at| at as i64);
        let all: Vec<i64> = match &self.ranks {
            Some(ranks) => ranks.all_gather(vec![own].into())?.into_vec(),
            None => vec![own],
        };
        let first = all.into_iter().enumerate().find(|(_, at)| *at != NONE);
        let named = |(rank, at): (usize, i64)| {
            let path = paths.get(at as usize).cloned();
            (rank, path.unwrap_or_else(|| format!("parameter {at}")))
        };
        Ok(first.map(named))
    }
}

fn due(every: u64, step: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

struct Fingerprint {
    finite: bool,
    hash: i64,
}

/// Fingerprints of the parameters of a module, or of their gradients.
#[derive(Default)]
struct Fingerprints<'a> {
    gradients: Option<&'a GradientsParams>,
    /// Whether each parameter is a running state, such as a running mean. Each rank updates its running states with its
    /// own batches.
    running: vec::IntoIter<bool>,
    path: Vec<String>,
    paths: Vec<String>,
    all: Vec<Fingerprint>,
}

impl<'a> Fingerprints<'a> {
    fn of_gradients<M: Module>(model: &M, gradients: &'a GradientsParams) -> Self {
        let mut all = Self {
            gradients: Some(gradients),
            ..Self::default()
        };
        model.visit(&mut all);
        all
    }

    fn of_parameters<M: Module>(model: &M) -> Self {
        let mut all = Self {
            running: running_states(model).into_iter(),
            ..Self::default()
        };
        model.visit(&mut all);
        all
    }
}

impl ModuleVisitor for Fingerprints<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match self.gradients {
            Some(gradients) => gradients.get::<D>(param.id),
            None if self.running.next() == Some(true) => None,
            None => Some(param.base().without_autodiff()),
        };
        let (mut hasher, mut finite) = (DefaultHasher::new(), true);
        tensor.is_some().hash(&mut hasher);
        if let Some(tensor) = tensor {
            for value in tensor.into_data().iter::<f64>() {
                finite &= value.is_finite();
                // Adding 0 makes +0 and -0 equal.
                (value + 0.0).to_bits().hash(&mut hasher);
            }
        }
        self.paths.push(self.path.join("."));
        self.all.push(Fingerprint {
            finite,
            hash: hasher.finish() as i64,
        });
    }
}
