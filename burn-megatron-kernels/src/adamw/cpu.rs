//! The CPU implementation. It updates the buffers in one pass, in tasks of a fixed number of elements.

use std::ops::Range;

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, bf16, f16};

use super::DECAY_BLOCK;
use super::update::StepScalars;
use crate::cpu::{
    Element, ROW_GRAIN, Real, for_each_task, own, slice, slice_mut, vector, vectorized,
};

/// The number of elements per task.
const TASK_ELEMENTS: usize = ROW_GRAIN;

/// Computes an optimizer step. See [`AdamWOp`](super::update::AdamWOp) for the inputs.
pub(super) fn update(
    inputs: Vec<FlexTensor>,
    model: Option<FlexTensor>,
    offset_in_block: usize,
    numbers: &StepScalars,
) -> Vec<FlexTensor> {
    let work = UpdateTask {
        inputs,
        model,
        offset_in_block,
        numbers,
    };
    match (work.inputs[0].dtype(), work.inputs[1].dtype()) {
        (DType::F64, _) => work.run::<f64, f64, f64, f64>(),
        (_, DType::BF16) => work.with_moments::<bf16>(),
        _ => work.with_moments::<f32>(),
    }
}

/// Returns the outputs of a skipped step: the unchanged buffers, and the copy of the weights.
pub(super) fn unchanged(mut inputs: Vec<FlexTensor>, model: Option<DType>) -> Vec<FlexTensor> {
    inputs.truncate(3);
    let copy = model.map(|model| match model {
        DType::F16 => narrowed::<f16>(&inputs[0]),
        DType::BF16 => narrowed::<bf16>(&inputs[0]),
        _ => inputs[0].clone(),
    });
    inputs.extend(copy);
    inputs
}

fn narrowed<C: Element<Wide = f32>>(master: &FlexTensor) -> FlexTensor {
    vector(slice::<f32>(master).iter().map(|x| C::narrow(*x)).collect())
}

struct UpdateTask<'a> {
    inputs: Vec<FlexTensor>,
    model: Option<FlexTensor>,
    offset_in_block: usize,
    numbers: &'a StepScalars,
}

impl UpdateTask<'_> {
    fn with_moments<M: Element<Wide = f32>>(self) -> Vec<FlexTensor> {
        match self.inputs[3].dtype() {
            DType::F16 => self.with_gradient::<M, f16>(),
            DType::BF16 => self.with_gradient::<M, bf16>(),
            _ => self.with_gradient::<M, f32>(),
        }
    }

    fn with_gradient<M: Element<Wide = f32>, G: Element<Wide = f32>>(self) -> Vec<FlexTensor> {
        match self.model.as_ref().map(FlexTensor::dtype) {
            Some(DType::F16) => self.run::<f32, M, G, f16>(),
            Some(DType::BF16) => self.run::<f32, M, G, bf16>(),
            _ => self.run::<f32, M, G, f32>(),
        }
    }

    fn run<W, M, G, C>(mut self) -> Vec<FlexTensor>
    where
        W: Real,
        M: Element<Wide = W>,
        G: Element<Wide = W>,
        C: Element<Wide = W>,
    {
        let length = self.inputs[0].layout().num_elements();
        let mut rest = self.inputs.split_off(3).into_iter();
        let gradient = rest.next();
        let gradient = gradient.as_ref().map_or(&[] as &[G], slice::<G>);
        let (decay, rate) = (rest.next(), rest.next());
        let factors = decay.as_ref().map(|decay| BlockFactors {
            decay: slice(decay),
            rate: rate.as_ref().map(slice),
            first: self.offset_in_block,
        });
        let mut moments = self.inputs.split_off(1).into_iter().map(own::<M>);
        let mut outputs: Vec<_> = self.inputs.into_iter().map(own::<W>).collect();
        outputs.extend(&mut moments);
        let mut copy = self.model.map(|model| {
            if model.is_unique() && model.is_contiguous() {
                return model;
            }
            vector(vec![C::narrow(W::ZERO); length])
        });
        let [master, first, second] = &mut outputs[..] else {
            unreachable!("three buffers are updated")
        };
        let mut parts: Vec<TaskSlices<'_, W, M, G, C>> =
            Vec::with_capacity(length.div_ceil(TASK_ELEMENTS));
        let mut copies = copy
            .as_mut()
            .map(|copy| slice_mut::<C>(copy).chunks_mut(TASK_ELEMENTS));
        for ((((number, master), first), second), gradient) in slice_mut::<W>(master)
            .chunks_mut(TASK_ELEMENTS)
            .enumerate()
            .zip(slice_mut::<M>(first).chunks_mut(TASK_ELEMENTS))
            .zip(slice_mut::<M>(second).chunks_mut(TASK_ELEMENTS))
            .zip(gradient.chunks(TASK_ELEMENTS))
        {
            let factors = factors.map(|factors| BlockFactors {
                first: factors.first + number * TASK_ELEMENTS,
                ..factors
            });
            parts.push(TaskSlices {
                master,
                first,
                second,
                gradient,
                factors,
                copy: copies.as_mut().and_then(Iterator::next),
            });
        }
        let numbers = WideScalars::<W>::new(self.numbers);
        for_each_task(parts, |part| part.update(&numbers));
        outputs.extend(copy);
        outputs
    }
}

/// The decay and learning rate factors of the blocks.
#[derive(Clone, Copy)]
struct BlockFactors<'a> {
    decay: &'a [f32],
    rate: Option<&'a [f32]>,
    /// The offset of the task's first element from the start of the first block.
    first: usize,
}

impl BlockFactors<'_> {
    /// Returns the range of blocks in which the `length` elements of a task lie.
    #[inline(always)]
    fn blocks(self, length: usize) -> Range<usize> {
        self.first / DECAY_BLOCK..(self.first + length).div_ceil(DECAY_BLOCK)
    }

    /// Returns the range of the task's elements that lie in `block`. The task has `length` elements.
    #[inline(always)]
    fn elements(self, block: usize, length: usize) -> Range<usize> {
        let start = (block * DECAY_BLOCK).saturating_sub(self.first);
        let end = (block + 1) * DECAY_BLOCK - self.first;
        start..end.min(length)
    }

    /// Returns the step size and the weight decay of a block.
    #[inline(always)]
    fn change<W: Real>(self, block: usize, numbers: &WideScalars<W>) -> [W; 2] {
        let factor = |factors: &[f32]| W::of(f64::from(factors[block]));
        let decay = numbers.decay * factor(self.decay);
        match self.rate.map(factor) {
            Some(rate) => [numbers.size * rate, decay * rate],
            None => [numbers.size, decay],
        }
    }
}

/// The scalars of a step, in the type of the weights.
struct WideScalars<W> {
    scale: W,
    first: [W; 2],
    second: [W; 2],
    size: W,
    root: W,
    epsilon: W,
    decay: W,
}

impl<W: Real> WideScalars<W> {
    fn new(numbers: &StepScalars) -> Self {
        Self {
            scale: W::of(numbers.scale),
            first: numbers.first.map(W::of),
            second: numbers.second.map(W::of),
            size: W::of(numbers.size),
            root: W::of(numbers.root),
            epsilon: W::of(numbers.epsilon),
            decay: W::of(numbers.decay),
        }
    }
}

/// The parts of the buffers that one task updates.
struct TaskSlices<'a, W, M, G, C> {
    master: &'a mut [W],
    first: &'a mut [M],
    second: &'a mut [M],
    gradient: &'a [G],
    factors: Option<BlockFactors<'a>>,
    copy: Option<&'a mut [C]>,
}

impl<W, M, G, C> TaskSlices<'_, W, M, G, C>
where
    W: Real,
    M: Element<Wide = W>,
    G: Element<Wide = W>,
    C: Element<Wide = W>,
{
    fn update(self, numbers: &WideScalars<W>) {
        let Self {
            master,
            first,
            second,
            gradient,
            factors,
            copy,
        } = self;
        vectorized(
            #[inline(always)]
            || {
                let length = gradient.len();
                let blocks = factors.map_or(0..1, |factors| factors.blocks(length));
                for block in blocks {
                    let (part, change) = match factors {
                        None => (0..length, [numbers.size, numbers.decay]),
                        Some(factors) => (
                            factors.elements(block, length),
                            factors.change(block, numbers),
                        ),
                    };
                    step(
                        &mut master[part.clone()],
                        &mut first[part.clone()],
                        &mut second[part.clone()],
                        &gradient[part],
                        change,
                        numbers,
                    );
                }
                if let Some(copy) = copy {
                    for (copy, weight) in copy.iter_mut().zip(master.iter()) {
                        *copy = C::narrow(*weight);
                    }
                }
            },
        );
    }
}

#[inline(always)]
fn step<W, M, G>(
    master: &mut [W],
    first: &mut [M],
    second: &mut [M],
    gradient: &[G],
    [size, decay]: [W; 2],
    numbers: &WideScalars<W>,
) where
    W: Real,
    M: Element<Wide = W>,
    G: Element<Wide = W>,
{
    for (((w, m), v), g) in master.iter_mut().zip(first).zip(second).zip(gradient) {
        let g = g.wide() * numbers.scale;
        let new_m = m.wide() * numbers.first[0] + g * numbers.first[1];
        let new_v = v.wide() * numbers.second[0] + g * g * numbers.second[1];
        *m = M::narrow(new_m);
        *v = M::narrow(new_v);
        let below = new_v.root() * numbers.root + numbers.epsilon;
        // With an epsilon of 0, the denominator is 0 for weights whose gradient was always 0, such as unused rows of an
        // embedding.
        let change = if below == W::ZERO {
            W::ZERO
        } else {
            size * new_m / below
        };
        *w = *w - (change + decay * *w);
    }
}
