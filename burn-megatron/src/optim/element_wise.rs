//! Any element-wise optimizer of Burn on this rank's part of each bucket.

use burn::module::Module;
use burn::optim::{AdamW, AdamWState, AdaptiveMomentumState, Optimizer};
use burn::tensor::{FloatDType, Tensor};
use burn_megatron_kernels::flat;

use super::OptimizerError;
use super::groups::ParameterGroup;
use super::multipliers::{self, Run};
use crate::data_parallel::{DistributedDataParallel, Flat, Gradients};

/// One of Burn's optimizers over the parameters of a model.
///
/// It must treat each element for itself, as Adam, SGD and RMSProp do: what a rank steps are
/// stretches of parameters, cut anywhere. Its state is not in
/// [`usage`](DistributedDataParallel::usage).
pub struct ElementWise<O: Optimizer> {
    buckets: Vec<Vec<Stepped<O>>>,
}

/// A stretch, with the optimizer of its weight decay.
struct Stepped<O: Optimizer> {
    run: Run,
    optimizer: O,
    state: Option<O::State<1>>,
}

impl<O: Optimizer> ElementWise<O> {
    /// `build` gives the optimizer for parameters whose weight decay is multiplied with its
    /// argument: 1 or 0, unless a group says otherwise. Every rank of the pipeline must come.
    ///
    /// # Errors
    ///
    /// [`OptimizerError`] for a group that is not right, or fits no parameter of the model.
    pub fn new<M: Module>(
        build: impl Fn(f64) -> O,
        groups: &[ParameterGroup],
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        let stepped = |run: Run| Stepped {
            optimizer: build(run.decay),
            run,
            state: None,
        };
        let buckets = multipliers::of_buckets(groups, ddp)?.into_iter();
        let buckets = buckets.map(|runs| runs.into_iter().map(stepped).collect());
        Ok(Self {
            buckets: buckets.collect(),
        })
    }

    /// Updates the parameters with the reduced gradients of one step. Every rank must come.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        ddp: &mut DistributedDataParallel<M>,
        gradients: Gradients,
    ) {
        let factor = gradients.factor();
        let sums: Vec<_> = gradients.into_sums().enumerate().collect();
        for (bucket, sum) in sums.into_iter().rev() {
            let Flat { mut tensor, held } = ddp.take(bucket);
            for stepped in &mut self.buckets[bucket] {
                tensor = stepped.step(learning_rate, tensor, &sum.tensor, factor);
            }
            let (model, main) = ddp.plan().types(bucket);
            let copy = (model != main).then(|| tensor.clone().cast(FloatDType::from(model)));
            ddp.plan().recycle(sum.tensor);
            ddp.put(bucket, Flat::holding(tensor, held), copy);
        }
        ddp.stepped();
    }
}

impl ElementWise<AdamW> {
    /// Both moments of a bucket, written over `zeros`.
    pub(super) fn moments(&self, bucket: usize, zeros: [Tensor<1>; 2]) -> [Tensor<1>; 2] {
        let write = |[first, second]: [Tensor<1>; 2], stepped: &Stepped<AdamW>| {
            let Some(AdamWState { momentum }) = stepped.state.clone() else {
                return [first, second];
            };
            let start = stepped.run.range.start;
            [
                flat::accumulate(first, start, momentum.moment_1, false),
                flat::accumulate(second, start, momentum.moment_2, false),
            ]
        };
        self.buckets[bucket].iter().fold(zeros, write)
    }

    /// Sets both moments of a bucket, as they are after so many steps.
    pub(super) fn restore(&mut self, bucket: usize, moments: [Tensor<1>; 2], steps: u64) {
        for stepped in &mut self.buckets[bucket] {
            let part = |of: &Tensor<1>| of.clone().slice([stepped.run.range.clone()]);
            let [first, second] = [part(&moments[0]), part(&moments[1])];
            let momentum = AdaptiveMomentumState::new(steps as usize, first, second);
            // Burn's AdamW begins with no state at all.
            stepped.state = (steps > 0).then(|| AdamWState::new(momentum));
        }
    }
}

impl<O: Optimizer> Stepped<O> {
    /// The bucket, with this stretch of it stepped.
    fn step(&mut self, rate: f64, whole: Tensor<1>, sum: &Tensor<1>, factor: f64) -> Tensor<1> {
        let range = self.run.range.clone();
        let gradient: Tensor<1> = sum.clone().slice([range.clone()]).mul_scalar(factor);
        let value = whole.clone().slice([range.clone()]);
        let state = self.state.take();
        let rate = rate * self.run.rate;
        let (value, state) = self.optimizer.step(rate, value, gradient, state);
        self.state = state;
        flat::accumulate(whole, range.start, value, false)
    }
}
