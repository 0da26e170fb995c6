//! AdamW on this rank's part of each bucket of parameters.

use burn::module::Module;
use burn::optim::AdamWConfig as BurnAdamWConfig;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_megatron_kernels::adamw::{AdamWBuffers, AdamWStep, Blocks, DECAY_BLOCK, Decay, adamw};

use super::element_wise::ElementWise;
use super::multipliers::{self, Run};
use super::{AdamWConfig, OptimizerError};
use crate::choice::Operation;
use crate::data_parallel::{
    Category, DistributedDataParallel, Flat, Gradients, Holding, Moments as MomentType, Plan,
};

/// What Burn's AdamW adds where the epsilon is 0: the root of the smallest normal f32, below that of every
/// second moment that has all its bits. Nothing over it, where no gradient has been, is 0 and not NaN.
const SMALLEST_ROOT: f32 = 1.084_202_2e-19;

/// AdamW over the parameters of a model.
///
/// Fused, each bucket is read and written once, and the division by tokens, the unscaling and the
/// clipping of its gradient happen on the way, as does the copy in the type of the model. Otherwise
/// it is Burn's AdamW.
pub struct ParallelAdamW {
    form: Form,
}

enum Form {
    Fused(Fused),
    Burn(Box<ElementWise<burn::optim::AdamW>>),
}

struct Fused {
    config: AdamWConfig,
    /// By bucket.
    decays: Vec<Decay>,
    states: Vec<Moments>,
    steps: u64,
}

/// What AdamW remembers of a bucket.
struct Moments {
    first: Tensor<1>,
    second: Tensor<1>,
    _held: [Holding; 2],
}

impl ParallelAdamW {
    /// The optimizer for the parameters of a model; every rank of the pipeline must come.
    ///
    /// # Errors
    ///
    /// [`OptimizerError`] for a setting or a group that is not right, or fits no parameter of the model, and for
    /// moments in bf16 where the optimizer is not fused.
    pub fn new<M: Module>(
        config: &AdamWConfig,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        config.check()?;
        let form = match ddp.kernels().is_fused(Operation::Optimizer) {
            true => Form::Fused(Fused::new(config, ddp)?),
            false if ddp.config().moments == MomentType::Bf16 => {
                return Err(OptimizerError::Moments);
            }
            false => {
                let settings = config.clone();
                let epsilon = match settings.epsilon as f32 {
                    0.0 => SMALLEST_ROOT,
                    epsilon => epsilon,
                };
                let build = move |decay: f64| {
                    BurnAdamWConfig::new()
                        .with_beta_1(settings.beta1 as f32)
                        .with_beta_2(settings.beta2 as f32)
                        .with_epsilon(epsilon)
                        .with_weight_decay((settings.weight_decay * decay) as f32)
                        .build()
                };
                Form::Burn(Box::new(ElementWise::new(build, &config.groups, ddp)?))
            }
        };
        Ok(Self { form })
    }

    /// Updates the parameters with the reduced gradients of one step. Every rank must come.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        let _span = tracing::debug_span!("optimizer_step").entered();
        match &mut self.form {
            Form::Fused(fused) => fused.step(learning_rate, ddp, gradients),
            Form::Burn(burn) => burn.step(learning_rate, ddp, gradients),
        }
    }
}

impl ParallelAdamW {
    /// Both moments of what this rank steps of a bucket; zeros before the first step.
    pub(crate) fn moments(&self, bucket: usize, plan: &Plan) -> [Tensor<1>; 2] {
        match &self.form {
            Form::Fused(fused) => {
                let Moments { first, second, .. } = &fused.states[bucket];
                [first.clone(), second.clone()]
            }
            Form::Burn(burn) => {
                let options = (&plan.device, plan.types(bucket).1);
                let zeros = || Tensor::zeros([plan.own(bucket).len()], options);
                burn.moments(bucket, [zeros(), zeros()])
            }
        }
    }

    /// The type of the moments of a bucket.
    pub(crate) fn moment_type(&self, bucket: usize, plan: &Plan) -> DType {
        match &self.form {
            Form::Fused(fused) => fused.states[bucket].first.dtype(),
            Form::Burn(_) => plan.types(bucket).1,
        }
    }

    /// Sets both moments of what this rank steps of a bucket, in the types that
    /// [`moments`](Self::moments) gives, as they are after so many steps.
    pub(crate) fn restore(&mut self, bucket: usize, moments: [Tensor<1>; 2], steps: u64) {
        match &mut self.form {
            Form::Fused(fused) => {
                fused.steps = steps;
                let state = &mut fused.states[bucket];
                [state.first, state.second] = moments;
            }
            Form::Burn(burn) => burn.restore(bucket, moments, steps),
        }
    }
}

impl Fused {
    fn new<M: Module>(
        config: &AdamWConfig,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        let plan = ddp.plan();
        let runs = multipliers::of_buckets(&config.groups, ddp)?;
        let decays = runs.iter().enumerate();
        let decays = decays.map(|(bucket, runs)| decay(plan, bucket, runs));
        let moments = |bucket: usize| {
            let (_, main) = plan.types(bucket);
            let dtype = match (plan.config.moments, main) {
                (MomentType::Bf16, DType::F32) => DType::BF16,
                _ => main,
            };
            let zeros = || Tensor::<1>::zeros([plan.own(bucket).len()], (&plan.device, dtype));
            let (first, second) = (zeros(), zeros());
            let held = [&first, &second];
            Moments {
                _held: held.map(|of| plan.usage.hold_tensor(Category::Optimizer, of)),
                first,
                second,
            }
        };
        Ok(Self {
            config: config.clone(),
            decays: decays.collect(),
            states: (0..plan.buckets()).map(moments).collect(),
            steps: 0,
        })
    }

    fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        self.steps += 1;
        let step = AdamWStep {
            rate: learning_rate,
            beta1: self.config.beta1,
            beta2: self.config.beta2,
            epsilon: self.config.epsilon,
            weight_decay: self.config.weight_decay,
            step: self.steps,
            gradient_scale: gradients.factor(),
        };
        let sums: Vec<_> = gradients.into_sums().enumerate().collect();
        // The last bucket has the first layers, which the next forward needs first.
        for (bucket, sum) in sums.into_iter().rev() {
            let _span = tracing::trace_span!("update", bucket).entered();
            self.step_bucket(bucket, &step, ddp, sum);
        }
        ddp.stepped();
    }

    fn step_bucket<M: Module>(
        &mut self,
        bucket: usize,
        step: &AdamWStep,
        ddp: &mut DistributedDataParallel<M>,
        sum: Flat,
    ) {
        let Flat { tensor, held } = ddp.take(bucket);
        let state = &mut self.states[bucket];
        let nothing = || Tensor::empty([0], &tensor.device());
        let buffers = AdamWBuffers {
            first: std::mem::replace(&mut state.first, nothing()),
            second: std::mem::replace(&mut state.second, nothing()),
            master: tensor,
        };
        let (model, main) = ddp.plan().types(bucket);
        let model = (model != main).then(|| FloatDType::from(model));
        let gradient = sum.tensor.clone();
        let (buffers, model) = adamw(buffers, gradient, &self.decays[bucket], step, model);
        state.first = buffers.first;
        state.second = buffers.second;
        let master = Flat::holding(buffers.master, held);
        ddp.plan().recycle(sum.tensor);
        ddp.put(bucket, master, model);
    }
}

/// The factors of a bucket's decay and rate, as its runs of parameters have them.
fn decay(plan: &Plan, bucket: usize, runs: &[Run]) -> Decay {
    let all = |fits: fn(&Run) -> bool| runs.iter().all(fits);
    if all(|run| run.rate == 1.0) && all(|run| run.decay == 1.0) {
        return Decay::All;
    }
    if all(|run| run.rate == 1.0) && all(|run| run.decay == 0.0) {
        return Decay::None;
    }
    let own = plan.own(bucket);
    let first = own.start % DECAY_BLOCK;
    let mut decay = vec![0f32; (first + own.len()).div_ceil(DECAY_BLOCK)];
    let mut rate = vec![1f32; decay.len()];
    for run in runs {
        // A parameter starts with a block, so that no block has two of them.
        let blocks =
            (first + run.range.start) / DECAY_BLOCK..(first + run.range.end).div_ceil(DECAY_BLOCK);
        decay[blocks.clone()].fill(run.decay as f32);
        rate[blocks].fill(run.rate as f32);
    }
    let tensor =
        |factors: Vec<f32>| Tensor::<1>::from_data(&factors[..], (&plan.device, DType::F32));
    let rate = rate.iter().any(|rate| *rate != 1.0).then_some(rate);
    Decay::Blocks(Blocks {
        decay: tensor(decay),
        rate: rate.map(tensor),
        first,
    })
}
