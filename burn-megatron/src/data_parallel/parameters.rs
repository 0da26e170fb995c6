//! The values of the parameters: whole on every rank, in the type of the model or in 8 bits, or
//! gathered block by block.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{FloatDType, Tensor};
use burn_megatron_kernels::{flat, fp8};

use super::memory::ZeroStage;
use super::order::Order;
use super::plan::{Kept, Plan};
use super::quantized::{self, Weights};
use super::usage::{Category, Flat, Holding};
use crate::collective::{PendingTensor, start_all_gather};
use crate::nn::door::{Pass, Value};
use crate::nn::fp8::QuantizedWeight;

/// The flat parameters of one rank, by bucket.
pub(super) struct Parameters {
    plan: Arc<Plan>,
    state: Mutex<State>,
}

struct State {
    buckets: Vec<Bucket>,
    order: Order,
    /// The bucket that is being computed with; full sharding only.
    present: Option<usize>,
}

#[derive(Default)]
struct Bucket {
    /// What this rank steps, where that is not a part of `whole`.
    master: Option<Flat>,
    /// What this rank gives to a gather, where that is not the master; full sharding only.
    shard: Option<Flat>,
    whole: Whole,
    /// Instead of `whole`, where the bucket's weights are kept in 8 bits.
    weights: Weights,
}

#[derive(Default)]
enum Whole {
    /// Other ranks have most of it.
    #[default]
    Away,
    /// It is being gathered.
    Coming(Box<PendingTensor<1>>, [Holding; 2]),
    Here(Arc<Gathered>),
}

/// All parameters of a bucket, in the type of the model. They stay as long as somebody uses them.
struct Gathered {
    /// Something until it is dropped.
    flat: Option<Flat>,
    plan: Arc<Plan>,
    /// Counts the block, where it is one of full sharding.
    _block: Option<Holding>,
}

impl Gathered {
    /// Parameters that stay.
    fn staying(tensor: Tensor<1>, plan: &Arc<Plan>) -> Whole {
        let flat = Some(plan.hold(tensor, Category::Parameters));
        let plan = plan.clone();
        Whole::Here(Arc::new(Self {
            flat,
            plan,
            _block: None,
        }))
    }

    fn tensor(&self) -> Tensor<1> {
        match &self.flat {
            Some(flat) => flat.tensor.clone(),
            None => unreachable!("it is taken by the drop alone"),
        }
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        if let Some(flat) = self.flat.take() {
            self.plan.recycle(flat.tensor);
        }
    }
}

impl Parameters {
    /// Zeros, to be [written](Self::write).
    pub fn new(plan: Arc<Plan>) -> Self {
        let bucket = |number: usize| {
            let ((model, main), own) = (plan.types(number), plan.own(number).len());
            let zeros =
                |elements, dtype, category| plan.hold(plan.zeros(elements, dtype), category);
            let full = plan.stage() == ZeroStage::Parameters;
            let in_8_bits = plan.kept(number) != Kept::Floats;
            Bucket {
                master: (full || in_8_bits || model != main).then(|| {
                    // A master that is computed with is a parameter.
                    let category = match full && model == main {
                        true => Category::Parameters,
                        false => Category::Optimizer,
                    };
                    zeros(own, main, category)
                }),
                shard: (full && model != main).then(|| zeros(own, model, Category::Parameters)),
                whole: match full || in_8_bits {
                    true => Whole::Away,
                    false => {
                        let elements = plan.elements(number);
                        let zeros = match plan.axes.shard.size() {
                            // Nothing is gathered, and the pool would keep the memory for it.
                            1 => Tensor::zeros([elements], (&plan.device, model)),
                            _ => plan.zeros(elements, model),
                        };
                        Gathered::staying(zeros, &plan)
                    }
                },
                weights: Weights::Away,
            }
        };
        let buckets = (0..plan.buckets()).map(bucket).collect();
        let state = State {
            buckets,
            order: Order::default(),
            present: None,
        };
        Self {
            plan,
            state: Mutex::new(state),
        }
    }

    /// Sets a parameter to `value`, flat and in its main type, on this rank alone. A weight that is kept
    /// in 8 bits is [quantised](Self::quantize) after that.
    pub fn write(&self, index: usize, value: &Tensor<1>) {
        let state = &mut *self.lock();
        let (number, range) = self.plan.place(index);
        let ((model, _), own) = (self.plan.types(number), self.plan.own(number));
        let bucket = &mut state.buckets[number];
        let overlap = own.start.max(range.start)..own.end.min(range.end);
        let part = |x: &Tensor<1>| {
            let part = overlap.start - range.start..overlap.end - range.start;
            x.clone().slice([part])
        };
        let narrow = value.clone().cast(model);
        if !overlap.is_empty() {
            let start = overlap.start - own.start;
            let put = |flat: &mut Flat, values: Tensor<1>| change(flat, start, values);
            if let Some(master) = &mut bucket.master {
                put(master, part(value));
            }
            if let Some(shard) = &mut bucket.shard {
                put(shard, part(&narrow));
            }
        }
        bucket.weights = Weights::Away;
        match &mut bucket.whole {
            Whole::Here(whole) if self.plan.stage() != ZeroStage::Parameters => {
                let flat = Arc::get_mut(whole).and_then(|whole| whole.flat.as_mut());
                match flat {
                    Some(flat) => change(flat, range.start, narrow),
                    // Who uses them keeps the old ones.
                    None => {
                        let flat = flat::accumulate(whole.tensor(), range.start, narrow, false);
                        bucket.whole = Gathered::staying(flat, &self.plan);
                    }
                }
            }
            // What was gathered is out of date.
            whole => *whole = Whole::Away,
        }
    }

    /// The value of a parameter, and what is to be kept while it is used.
    pub fn value(&self, index: usize, pass: Pass) -> Value {
        let state = &mut *self.lock();
        let (number, range) = self.plan.place(index);
        if let Some(weight) = state.quantized(index, &self.plan) {
            let model = FloatDType::from(self.plan.parameters[index].model);
            let values: Tensor<1> = fp8::dequantize(&weight.rowwise).reshape([range.len()]);
            return Value {
                flat: values.cast(model),
                keep: None,
            };
        }
        let full = self.plan.stage() == ZeroStage::Parameters;
        if full && state.present != Some(number) {
            state.turn_to(number, pass, &self.plan);
        }
        let whole = state.buckets[number].whole(number, &self.plan);
        let flat = whole.tensor().slice([range]);
        match full {
            true if self.plan.parameters[index].shape.len() < 2 => Value {
                // A vector is copied out, as graphs that save it would keep its whole block.
                flat: flat.mul_scalar(1.0),
                keep: None,
            },
            true => Value {
                flat,
                keep: Some(whole),
            },
            false => Value { flat, keep: None },
        }
    }

    /// Both copies of a weight that is kept in 8 bits.
    pub fn quantized(&self, index: usize) -> Option<Arc<QuantizedWeight>> {
        self.lock().quantized(index, &self.plan)
    }

    /// Makes the 8-bit weights of all buckets from the masters; every rank of the stage must come. Where
    /// gathers overlap with what follows, codes may still be on their way after that, and the values of
    /// one bucket.
    pub fn quantize(&self) {
        let (plan, state) = (&self.plan, &mut *self.lock());
        // The last bucket has the first layers, which the next forward needs first.
        let of = |kept| {
            (0..plan.buckets())
                .rev()
                .filter(move |number| plan.kept(*number) == kept)
        };
        let masters: Vec<_> = of(Kept::Codes)
            .map(|number| (number, state.buckets[number].kept(number, plan)))
            .collect();
        let weights = quantized::start_codes(&masters, plan);
        for ((number, _), weights) in masters.into_iter().zip(weights) {
            state.buckets[number].weights = weights;
        }
        for number in of(Kept::Blocks) {
            state.settle(plan);
            let bucket = &mut state.buckets[number];
            let master = bucket.kept(number, plan);
            bucket.weights = quantized::start_values(number, &master, plan);
        }
    }

    /// Quantises values that were gathered in the place of gradients, before these come.
    pub fn settle(&self) {
        if self.plan.config.fp8_param_gather {
            self.lock().settle(&self.plan);
        }
    }

    /// A forward begins.
    pub fn begin(&self) {
        self.lock().order.begin();
    }

    /// The step's last backward is over: nothing stays gathered. Returns a fingerprint of what was
    /// gathered.
    pub fn end(&self) -> u64 {
        let state = &mut *self.lock();
        state.settle(&self.plan);
        if self.plan.stage() == ZeroStage::Parameters {
            state.release_all();
        }
        state.order.end()
    }

    /// What this rank steps of a bucket, for the optimizer, which [gives it back](Self::put).
    pub fn take(&self, number: usize) -> Flat {
        let plan = &self.plan;
        let bucket = &mut self.lock().buckets[number];
        if let Some(master) = bucket.master.take() {
            // What was made from it goes before it is made anew.
            bucket.shard = None;
            bucket.whole = Whole::Away;
            bucket.weights = Weights::Away;
            return master;
        }
        let whole = bucket.whole(number, plan);
        bucket.whole = Whole::Away;
        let own = |whole: &Gathered| {
            let own = whole.tensor().slice([plan.own(number)]);
            plan.hold(plan.copy(own), Category::Buffers)
        };
        match Arc::try_unwrap(whole) {
            Ok(mut whole) if plan.axes.shard.size() == 1 => match whole.flat.take() {
                Some(flat) => flat,
                None => unreachable!("it is taken by the drop alone"),
            },
            Ok(whole) => own(&whole),
            Err(used) => own(&used),
        }
    }

    /// Takes what this rank has stepped, and its copy in the type of the model where that is
    /// another one, and starts gathering what the others have. What is kept in 8 bits is
    /// [quantised](Self::quantize) when all buckets are stepped.
    pub fn put(&self, number: usize, master: Flat, model: Option<Tensor<1>>) {
        let Flat {
            tensor: master,
            held,
        } = master;
        drop(held);
        let plan = &self.plan;
        let bucket = &mut self.lock().buckets[number];
        if plan.kept(number) != Kept::Floats {
            bucket.master = Some(plan.hold(master, Category::Optimizer));
            return;
        }
        let full = plan.stage() == ZeroStage::Parameters;
        let (keep, category) = match (full, model.is_some()) {
            (true, false) => (true, Category::Parameters),
            (_, separate) => (separate, Category::Optimizer),
        };
        let part = match keep {
            true => {
                bucket.master = Some(plan.hold(master, category));
                model
            }
            false => Some(master),
        };
        match (full, part) {
            (true, shard) => {
                bucket.shard = shard.map(|shard| plan.hold(shard, Category::Parameters));
                bucket.whole = Whole::Away;
            }
            (false, Some(part)) if plan.axes.shard.size() == 1 => {
                bucket.whole = Gathered::staying(part, plan);
            }
            (false, Some(part)) => {
                // The old values go before the new ones come.
                bucket.whole = Whole::Away;
                bucket.whole = coming(number, part, Category::Parameters, plan);
            }
            (false, None) => unreachable!("a sharded step has something to gather"),
        }
    }

    /// Waits until every bucket that is being gathered is here.
    pub fn wait(&self) {
        let state = &mut *self.lock();
        for (number, bucket) in state.buckets.iter_mut().enumerate() {
            if matches!(bucket.whole, Whole::Coming(..)) {
                bucket.whole(number, &self.plan);
            }
            if bucket.weights.are_coming() {
                bucket.weights.here(number, &self.plan);
            }
        }
    }

    /// The part of a bucket that this rank steps, in the type that it is stepped in.
    pub fn kept(&self, number: usize) -> Tensor<1> {
        self.lock().buckets[number].kept(number, &self.plan)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Under full sharding: brings a block, starts the next one, and lets the others go.
    fn turn_to(&mut self, number: usize, pass: Pass, plan: &Arc<Plan>) {
        let next = self.order.next(number, self.buckets.len(), pass);
        self.present = Some(number);
        let keeps = plan.config.keep_gathered && pass == Pass::Forward;
        for (other, bucket) in self.buckets.iter_mut().enumerate() {
            if other != number && Some(other) != next && !keeps {
                bucket.whole = Whole::Away;
            }
        }
        for number in [Some(number), next].into_iter().flatten() {
            self.buckets[number].start(number, plan);
        }
    }

    /// Both copies of a weight that is kept in 8 bits.
    fn quantized(&mut self, index: usize, plan: &Plan) -> Option<Arc<QuantizedWeight>> {
        plan.parameters[index].quantizer.as_ref()?;
        let (number, _) = plan.place(index);
        let weights = self.buckets[number].weights.here(number, plan);
        Some(weights[plan.position(number, index)].clone())
    }

    /// Quantises gathered values. At most one bucket has some.
    fn settle(&mut self, plan: &Plan) {
        for (number, bucket) in self.buckets.iter_mut().enumerate() {
            if bucket.weights.are_values() {
                bucket.weights.here(number, plan);
            }
        }
    }

    fn release_all(&mut self) {
        self.present = None;
        for bucket in &mut self.buckets {
            bucket.whole = Whole::Away;
        }
    }
}

impl Bucket {
    /// The part that this rank steps, in the type that it is stepped in.
    fn kept(&mut self, number: usize, plan: &Arc<Plan>) -> Tensor<1> {
        match &self.master {
            Some(master) => master.tensor.clone(),
            None => {
                let whole = self.whole(number, plan);
                whole.tensor().slice([plan.own(number)])
            }
        }
    }

    /// Starts gathering, if it is away.
    fn start(&mut self, number: usize, plan: &Arc<Plan>) {
        if !matches!(self.whole, Whole::Away) {
            return;
        }
        let part = match (&self.shard, &self.master) {
            (Some(part), _) | (None, Some(part)) => plan.copy(part.tensor.clone()),
            (None, None) => unreachable!("a rank keeps its part of what is away"),
        };
        self.whole = coming(number, part, Category::Buffers, plan);
    }

    /// The gathered parameters; waits for them where they are on their way.
    fn whole(&mut self, number: usize, plan: &Arc<Plan>) -> Arc<Gathered> {
        self.start(number, plan);
        if matches!(self.whole, Whole::Coming(..))
            && let Whole::Coming(pending, [bytes, block]) = std::mem::take(&mut self.whole)
        {
            let flat = Some(Flat::holding(pending.wait(), bytes));
            let plan = plan.clone();
            self.whole = Whole::Here(Arc::new(Gathered {
                flat,
                plan,
                _block: Some(block),
            }));
        }
        match &self.whole {
            Whole::Here(whole) => whole.clone(),
            Whole::Away | Whole::Coming(..) => unreachable!("it was waited for"),
        }
    }
}

/// Starts gathering a bucket from the parts of the ranks.
fn coming(number: usize, part: Tensor<1>, category: Category, plan: &Plan) -> Whole {
    let bytes = plan.elements(number) * part.dtype().size();
    let held = [plan.usage.hold(category, bytes), plan.usage.hold_block()];
    let pending = start_all_gather(part, 0, &plan.axes.shard);
    Whole::Coming(Box::new(pending), held)
}

/// Writes over a stretch.
fn change(flat: &mut Flat, start: usize, values: Tensor<1>) {
    let nothing = Tensor::empty([0], (&values.device(), values.dtype()));
    let tensor = std::mem::replace(&mut flat.tensor, nothing);
    flat.tensor = flat::accumulate(tensor, start, values, false);
}
