//! The gradients of one rank on their way into the sums over the ranks.
//!
//! Each bucket is a flat buffer in which the gradients of its parameters are added up. With the last
//! gradient that is to come, its sum over the ranks begins, while backward goes on. From ZeRO-2 on
//! only the sum of this rank's shard stays, so a bucket is summed and its buffer freed after each
//! micro-batch.
//!
//! Sums begin in the order of the buckets, whatever order the gradients come in: ranks that use their
//! parameters differently, or have no micro-batch at all, still call the same collectives.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Tensor;
use burn_megatron_kernels::flat;

use super::memory::ZeroStage;
use super::plan::Plan;
use super::reduction::{Reduction, start};
use super::usage::{Category, Flat};
use super::uses::Uses;
use super::{Culprit, DataParallelError, guard};
use crate::nn::door::{Deferred, LaterGradient, Place};

pub(super) struct Buckets {
    plan: Arc<Plan>,
    state: Mutex<State>,
    /// Weight gradients that are put off; none where they are computed at once.
    deferred: Mutex<Option<Vec<Deferred>>>,
}

struct State {
    uses: Uses,
    buckets: Vec<Bucket>,
    flying: VecDeque<(usize, Reduction)>,
    /// What was summed in this step, for a comparison of the ranks.
    print: u64,
    culprits: Vec<Culprit>,
    warned: BTreeSet<usize>,
}

#[derive(Default)]
struct Bucket {
    flat: Option<Flat>,
    /// By place in the bucket: the gradients that came since the last sum began.
    given: Vec<usize>,
    /// Sums of this step that have begun.
    rounds: usize,
    /// The sums that are complete.
    sum: Option<Flat>,
}

/// What a rank has of a step's gradients.
pub(super) struct Summed {
    /// By bucket: the part that this rank steps, summed over the data axis.
    pub shards: Vec<Flat>,
    pub print: u64,
    pub culprits: Vec<Culprit>,
}

impl Buckets {
    pub fn new(plan: Arc<Plan>) -> Self {
        let state = State::new(&plan);
        Self {
            plan,
            state: Mutex::new(state),
            deferred: Mutex::new(None),
        }
    }

    /// A forward begins, of a stage where there are stages.
    pub fn begin(&self, stage: Option<usize>) {
        self.lock().uses.begin(stage);
    }

    /// No forward will come any more: of a stage, or at all.
    pub fn close(&self, stage: Option<usize>) {
        let state = &mut *self.lock();
        state.uses.close(stage);
        state.advance(&self.plan);
    }

    /// A backward of a module without stages is over.
    pub fn backward(&self) {
        self.lock().uses.backward();
    }

    pub fn expect(&self, index: usize) {
        self.lock().uses.expect(index);
    }

    /// Adds the gradient of one use, flat.
    pub fn accumulate(&self, index: usize, gradient: Tensor<1>) {
        self.add(index, |place| {
            flat::accumulate(place.flat, place.offset, gradient, place.add)
        });
    }

    pub fn accumulate_later(&self, index: usize, gradient: LaterGradient) {
        // The lock is not held while a gradient is computed.
        if let Some(deferred) = &mut *lock(&self.deferred) {
            deferred.push((index, gradient));
            return;
        }
        self.add(index, |place| gradient(Some(place)));
    }

    /// The place of a gradient goes into `compute`, which gives it back.
    fn add(&self, index: usize, compute: impl FnOnce(Place) -> Tensor<1>) {
        let (number, range) = self.plan.place(index);
        let (place, held) = {
            let state = &mut *self.lock();
            if !state.uses.is_open(index) {
                tracing::warn!(
                    parameter = self.plan.parameters[index].path,
                    "a gradient came after its step was over"
                );
                return;
            }
            let bucket = &mut state.buckets[number];
            let add = bucket.given[self.plan.position(number, index)] > 0;
            let Flat { tensor, held } = bucket.flat(number, &self.plan);
            let offset = range.start;
            let flat = tensor;
            (Place { flat, offset, add }, held)
        };
        let tensor = compute(place);
        let state = &mut *self.lock();
        let bucket = &mut state.buckets[number];
        bucket.flat = Some(Flat { tensor, held });
        bucket.given[self.plan.position(number, index)] += 1;
        state.uses.complete(index);
        state.advance(&self.plan);
    }

    pub fn set_deferring(&self, deferring: bool) {
        *lock(&self.deferred) = deferring.then(Vec::new);
    }

    pub fn take_deferred(&self) -> Vec<Deferred> {
        let mut deferred = lock(&self.deferred);
        deferred.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Ends the step: sums what has not been summed, and waits for it.
    ///
    /// A parameter that the step did not use has zeros, which is said once.
    pub fn finish(&self) -> Result<Summed, DataParallelError> {
        let fresh = State::new(&self.plan);
        let mut state = std::mem::replace(&mut *self.lock(), fresh);
        self.lock().warned = std::mem::take(&mut state.warned);
        if let Some((index, uses)) = state.uses.without_backward() {
            let path = self.plan.parameters[index].path.clone();
            return Err(DataParallelError::NoBackward { path, uses });
        }
        let stage = self.plan.stage();
        match state.uses.micro_batches() {
            0 if stage >= ZeroStage::Gradients && self.plan.axes.data.size() > 1 => {
                return Err(DataParallelError::SatOut { stage });
            }
            0 => {}
            _ => state.warn_of_unused(&self.plan, &mut self.lock().warned),
        }
        state.start_rest(&self.plan);
        state.land_all(&self.plan);
        let State {
            buckets,
            print,
            culprits,
            ..
        } = state;
        let sums = buckets.into_iter().enumerate();
        let shards = sums.map(|(number, bucket)| match bucket.sum {
            Some(sum) => sum,
            None => unreachable!("bucket {number} was summed"),
        });
        Ok(Summed {
            shards: shards.collect(),
            print,
            culprits,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn new(plan: &Plan) -> Self {
        let bucket = |number| Bucket {
            given: vec![0; plan.layout.bucket(number).parameters.len()],
            ..Bucket::default()
        };
        Self {
            uses: Uses::new(plan.parameters.len()),
            buckets: (0..plan.buckets()).map(bucket).collect(),
            flying: VecDeque::new(),
            print: 0,
            culprits: vec![],
            warned: BTreeSet::new(),
        }
    }

    /// Begins the sums that can begin.
    fn advance(&mut self, plan: &Plan) {
        if !plan.config.overlap_grad_reduce && plan.stage() < ZeroStage::Gradients {
            return;
        }
        while let Some(ready) = self.next_ready(plan) {
            self.start(ready, plan);
            if !plan.config.overlap_grad_reduce {
                self.land(plan, 0);
            }
        }
    }

    /// The buckets whose turn it is and that are complete.
    fn next_ready(&self, plan: &Plan) -> Option<Range<usize>> {
        if self.buckets.is_empty() {
            // The rank has no parameters, as in an empty stage of a pipeline.
            return None;
        }
        let rounds = |number: usize| self.buckets[number].rounds;
        // The first bucket that is a round behind the one before it, or else the first of all.
        let behind = (1..plan.buckets()).find(|number| rounds(*number) < rounds(number - 1));
        let first = behind.unwrap_or(0);
        let sharded = plan.stage() >= ZeroStage::Gradients;
        let is_ready = |number: &usize| match sharded {
            true => self.is_full(*number, plan),
            false => rounds(*number) == 0 && self.is_final(*number, plan),
        };
        let round = rounds(first);
        let ready = (first..plan.buckets())
            .take_while(|number| rounds(*number) == round && is_ready(number))
            .count();
        (ready > 0).then(|| first..first + ready)
    }

    /// No gradient of this bucket will come any more.
    fn is_final(&self, number: usize, plan: &Plan) -> bool {
        let parameters = &plan.layout.bucket(number).parameters;
        parameters
            .iter()
            .all(|placed| self.uses.is_final(placed.index))
    }

    /// Every parameter of this bucket has the gradients of a micro-batch.
    fn is_full(&self, number: usize, plan: &Plan) -> bool {
        let given = &self.buckets[number].given;
        let parameters = plan.layout.bucket(number).parameters.iter();
        given.iter().any(|given| *given > 0)
            && parameters
                .zip(given)
                .all(|(placed, given)| *given >= self.uses.of_a_forward(placed.index).max(1))
    }

    /// Begins the sums of some buckets, in one call.
    fn start(&mut self, numbers: Range<usize>, plan: &Plan) {
        if plan.stage() >= ZeroStage::Gradients {
            // One bucket is on its way while the next one is filled.
            self.land(plan, 0);
        }
        let flats: Vec<_> = numbers
            .clone()
            .map(|number| {
                let flat = self.buckets[number].complete(number, plan);
                let found = guard::culprit(number, &flat.tensor, plan);
                self.culprits.extend(found);
                self.print = self
                    .print
                    .wrapping_mul(0x0000_0100_0000_01b3)
                    .wrapping_add(number as u64 + 1);
                self.buckets[number].rounds += 1;
                flat
            })
            .collect();
        self.flying.extend(numbers.zip(start(flats, plan)));
    }

    /// Begins what is left: every bucket once, or from ZeRO-2 on once for each micro-batch.
    fn start_rest(&mut self, plan: &Plan) {
        let rounds = match plan.stage() >= ZeroStage::Gradients {
            true => self.uses.micro_batches().max(1),
            false => 1,
        };
        for round in 0..rounds {
            self.start_round(round, plan);
        }
        let left = |bucket: &Bucket| bucket.given.iter().any(|given| *given > 0);
        if self.buckets.iter().any(left) {
            let most = self.buckets.iter().map(|bucket| bucket.rounds).max();
            self.start_round(most.unwrap_or(0), plan);
        }
    }

    fn start_round(&mut self, round: usize, plan: &Plan) {
        for number in 0..plan.buckets() {
            if self.buckets[number].rounds <= round {
                self.start(number..number + 1, plan);
            }
        }
    }

    /// Waits for the oldest sums until so many are left.
    fn land(&mut self, plan: &Plan, left: usize) {
        while self.flying.len() > left {
            if let Some((number, reduction)) = self.flying.pop_front() {
                self.buckets[number].take_in(reduction, plan);
            }
        }
    }

    /// Waits for all sums. Where nothing is sharded, each rank begins at another one, so that they
    /// share the work where it is the waiting rank that adds up.
    fn land_all(&mut self, plan: &Plan) {
        let axes = &plan.axes;
        if axes.shard.size() == 1 && !self.flying.is_empty() {
            let first = axes.data.rank() * self.flying.len() / axes.data.size();
            self.flying.rotate_left(first);
        }
        self.land(plan, 0);
    }

    fn warn_of_unused(&self, plan: &Plan, warned: &mut BTreeSet<usize>) {
        for (index, parameter) in plan.parameters.iter().enumerate() {
            if !self.uses.has_gradient(index) && warned.insert(index) {
                tracing::warn!(
                    parameter = parameter.path,
                    "no gradient came: the loss does not depend on it, and it counts as zero"
                );
            }
        }
    }
}

impl Bucket {
    /// The buffer, with anything in the places that no gradient has been given for.
    fn flat(&mut self, number: usize, plan: &Plan) -> Flat {
        self.flat.take().unwrap_or_else(|| {
            let (_, main) = plan.types(number);
            let category = match plan.stage() >= ZeroStage::Gradients {
                true => Category::Buffers,
                false => Category::Gradients,
            };
            plan.hold(plan.uninitialised(plan.elements(number), main), category)
        })
    }

    /// The buffer, with zeros where nothing was given.
    fn complete(&mut self, number: usize, plan: &Plan) -> Flat {
        let Flat { mut tensor, held } = self.flat(number, plan);
        let bucket = plan.layout.bucket(number);
        let mut end = 0;
        let mut clear = |range: Range<usize>| {
            if !range.is_empty() {
                let options = (&tensor.device(), tensor.dtype());
                let zeros = Tensor::zeros([range.len()], options);
                let flat = std::mem::replace(&mut tensor, Tensor::empty([0], options));
                tensor = flat::accumulate(flat, range.start, zeros, false);
            }
        };
        for (placed, given) in bucket.parameters.iter().zip(&mut self.given) {
            let start = if *given == 0 {
                placed.range.end
            } else {
                placed.range.start
            };
            clear(end..start);
            end = placed.range.end;
            *given = 0;
        }
        clear(end..bucket.padded());
        Flat { tensor, held }
    }

    /// Waits for a sum, and adds it to those of earlier micro-batches.
    fn take_in(&mut self, reduction: Reduction, plan: &Plan) {
        // What is added to an earlier sum does not stay.
        let category = match self.sum {
            None => Category::Gradients,
            Some(_) => Category::Buffers,
        };
        let sum = reduction.wait(category, plan);
        self.sum = Some(match self.sum.take() {
            None => sum,
            Some(Flat { tensor, held }) => {
                let tensor = flat::accumulate(tensor, 0, sum.tensor.clone(), true);
                plan.recycle(sum.tensor);
                Flat { tensor, held }
            }
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
