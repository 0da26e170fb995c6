//! The step on Burn's CPU backend: one pass, tasks of a fixed number of elements.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, bf16, f16};
use rayon::prelude::*;

use super::DECAY_BLOCK;
use super::update::Numbers;
use crate::cpu::{Element, ROW_GRAIN, Real, slice, tensor, vectorized};

const _: () = assert!(ROW_GRAIN.is_multiple_of(DECAY_BLOCK));

/// The elements of one task.
const GRAIN: usize = ROW_GRAIN;

/// See [`Update`](super::update::Update) for the inputs.
pub(super) fn update(
    inputs: Vec<FlexTensor>,
    blocks: bool,
    numbers: &Numbers,
    model: Option<DType>,
) -> Vec<FlexTensor> {
    let work = Work {
        inputs,
        blocks,
        numbers,
        model,
    };
    match (work.inputs[0].dtype(), work.inputs[1].dtype()) {
        (DType::F64, _) => work.run::<f64, f64, f64, f64>(),
        (_, DType::BF16) => work.with_moments::<bf16>(),
        _ => work.with_moments::<f32>(),
    }
}

struct Work<'a> {
    inputs: Vec<FlexTensor>,
    blocks: bool,
    numbers: &'a Numbers,
    model: Option<DType>,
}

impl Work<'_> {
    fn with_moments<M: Element<Wide = f32>>(self) -> Vec<FlexTensor> {
        match self.inputs[3].dtype() {
            DType::F16 => self.with_gradient::<M, f16>(),
            DType::BF16 => self.with_gradient::<M, bf16>(),
            _ => self.with_gradient::<M, f32>(),
        }
    }

    fn with_gradient<M: Element<Wide = f32>, G: Element<Wide = f32>>(self) -> Vec<FlexTensor> {
        match self.model {
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
        let factors = rest.next().filter(|_| self.blocks);
        let factors = factors.as_ref().map(slice::<f32>);
        let mut moments = self.inputs.split_off(1).into_iter().map(own::<M>);
        let mut outputs: Vec<_> = self.inputs.into_iter().map(own::<W>).collect();
        outputs.extend(&mut moments);
        let mut copy = self.model.map(|_| vec![C::narrow(W::ZERO); length]);
        let [master, first, second] = &mut outputs[..] else {
            unreachable!("three buffers are updated")
        };
        let mut parts: Vec<Part<'_, W, M, G, C>> = Vec::with_capacity(length.div_ceil(GRAIN));
        let mut factors = factors.map(|factors| factors.chunks(GRAIN / DECAY_BLOCK));
        let mut copies = copy.as_mut().map(|copy| copy.chunks_mut(GRAIN));
        for (((master, first), second), gradient) in master
            .storage_mut::<W>()
            .chunks_mut(GRAIN)
            .zip(first.storage_mut::<M>().chunks_mut(GRAIN))
            .zip(second.storage_mut::<M>().chunks_mut(GRAIN))
            .zip(gradient.chunks(GRAIN))
        {
            parts.push(Part {
                master,
                first,
                second,
                gradient,
                factors: factors.as_mut().and_then(Iterator::next),
                copy: copies.as_mut().and_then(Iterator::next),
            });
        }
        let numbers = Wide::<W>::new(self.numbers);
        match parts.len() {
            0 | 1 => parts.into_iter().for_each(|part| part.update(&numbers)),
            _ => parts.into_par_iter().for_each(|part| part.update(&numbers)),
        }
        outputs.extend(copy.map(|copy| tensor::<C>(copy, [length])));
        outputs
    }
}

/// The tensor itself where nobody else holds its memory and it fills it; a copy otherwise.
fn own<E: Element>(flex: FlexTensor) -> FlexTensor {
    let length = flex.layout().num_elements();
    match flex.is_unique() && flex.storage::<E>().len() == length {
        true => flex,
        false => tensor::<E>(slice::<E>(&flex).to_vec(), [length]),
    }
}

/// The numbers in the type of the weights.
struct Wide<W> {
    scale: W,
    first: [W; 2],
    second: [W; 2],
    size: W,
    root: W,
    epsilon: W,
    decay: W,
}

impl<W: Real> Wide<W> {
    fn new(numbers: &Numbers) -> Self {
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

/// What one task works on.
struct Part<'a, W, M, G, C> {
    master: &'a mut [W],
    first: &'a mut [M],
    second: &'a mut [M],
    gradient: &'a [G],
    factors: Option<&'a [f32]>,
    copy: Option<&'a mut [C]>,
}

impl<W, M, G, C> Part<'_, W, M, G, C>
where
    W: Real,
    M: Element<Wide = W>,
    G: Element<Wide = W>,
    C: Element<Wide = W>,
{
    fn update(self, numbers: &Wide<W>) {
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
                match factors {
                    None => step(master, first, second, gradient, numbers.decay, numbers),
                    Some(factors) => {
                        let blocks = master
                            .chunks_mut(DECAY_BLOCK)
                            .zip(first.chunks_mut(DECAY_BLOCK))
                            .zip(second.chunks_mut(DECAY_BLOCK))
                            .zip(gradient.chunks(DECAY_BLOCK));
                        for ((((w, m), v), g), factor) in blocks.zip(factors) {
                            let decay = numbers.decay * W::of(f64::from(*factor));
                            step(w, m, v, g, decay, numbers);
                        }
                    }
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
    decay: W,
    numbers: &Wide<W>,
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
        let change = numbers.size * new_m / (new_v.root() * numbers.root + numbers.epsilon);
        *w = *w - (change + decay * *w);
    }
}
