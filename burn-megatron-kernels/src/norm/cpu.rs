//! The CPU implementations. They make one pass over memory, a row at a time. Parallel tasks consist of complete rows.

use burn::backend::flex::FlexTensor;

use super::backward::{
    EachParameter, NamedInputs, NormBackwardOp, NormFormula, NormForwardOp, NormGradients,
};
use crate::column_sum::cpu::write;
use crate::cpu::{
    Element, Real, add, for_each_task, for_float, rows_per_task, slice, tensor, vectorized, widen,
};

/// The number of partial sums per row. They fill two AVX-512 registers of f32.
const PARTIALS: usize = 32;

/// Computes the forward pass. See [`NormForwardOp`].
pub(super) fn forward(op: &NormForwardOp, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    let inputs = op.inputs.split(&inputs);
    let dtype = inputs.x.dtype();
    let residual = inputs.residual.map_or(dtype, FlexTensor::dtype);
    for_float!(dtype, X => if residual != dtype {
        forward_as::<X, <X as Element>::Wide>(op.formula, inputs)
    } else {
        forward_as::<X, X>(op.formula, inputs)
    })
}

/// Computes the backward pass. See [`NormBackwardOp`].
pub(super) fn backward(op: &NormBackwardOp, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    let flat = op.places.as_ref().and_then(|_| inputs.pop());
    let dtype = inputs[2].dtype();
    let (input, sums) = for_float!(dtype, Y => if inputs[0].dtype() != dtype {
        backward_as::<Y, <Y as Element>::Wide>(op.formula, op.wanted, &inputs)
    } else {
        backward_as::<Y, Y>(op.formula, op.wanted, &inputs)
    });
    let mut outputs = Vec::from_iter(input);
    outputs.extend(write(sums, op.sums, flat.zip(op.places.clone())));
    outputs
}

/// Converts a parameter to the type of the computation.
fn parameter<R: Real>(values: &FlexTensor, offset: R) -> Vec<R> {
    for_float!(values.dtype(), W => {
        let value = |w: &W| R::of(w.wide().double()) + offset;
        slice::<W>(values).iter().map(value).collect()
    })
}

/// Returns the factors of the normalized values: the weight, or the weight plus one.
fn factors<R: Real>(formula: NormFormula, weight: &FlexTensor) -> Vec<R> {
    let offset = if formula.options.zero_centered {
        R::ONE
    } else {
        R::ZERO
    };
    parameter(weight, offset)
}

/// Returns the sums of `terms(a[i], b[i])` over two rows. The order of the additions depends only on the length.
#[inline(always)]
fn sums<R: Real, const K: usize>(a: &[R], b: &[R], terms: impl Fn(R, R) -> [R; K]) -> [R; K] {
    let mut partial = [[R::ZERO; PARTIALS]; K];
    let (wide_a, rest_a) = a.as_chunks::<PARTIALS>();
    let (wide_b, rest_b) = b.as_chunks::<PARTIALS>();
    for (a, b) in wide_a.iter().zip(wide_b) {
        for i in 0..PARTIALS {
            let terms = terms(a[i], b[i]);
            for k in 0..K {
                partial[k][i] += terms[k];
            }
        }
    }
    let mut total = partial.map(|partial| {
        let mut folded = [R::ZERO; 4];
        for chunk in partial.as_chunks::<4>().0 {
            for i in 0..4 {
                folded[i] += chunk[i];
            }
        }
        (folded[0] + folded[1]) + (folded[2] + folded[3])
    });
    for (a, b) in rest_a.iter().zip(rest_b) {
        let terms = terms(*a, *b);
        for k in 0..K {
            total[k] += terms[k];
        }
    }
    total
}

/// Returns the reciprocal of the standard deviation, and the mean in two parts. For RMSNorm, the mean is 0.
///
/// The second part of the mean is the mean of the differences from the first part. It corrects the mean and the
/// variance for the rounding of the first part.
#[inline(always)]
fn statistics<R: Real>(formula: NormFormula, row: &[R]) -> [R; 3] {
    let count = R::of(row.len() as f64);
    let epsilon = R::of(formula.options.epsilon);
    if !formula.centred {
        let [squares] = sums(row, row, |x, _| [x * x]);
        return [
            R::ONE / (squares / count + epsilon).root(),
            R::ZERO,
            R::ZERO,
        ];
    }
    let [sum] = sums(row, row, |x, _| [x]);
    let mean = sum / count;
    let [rest, squares] = sums(row, row, |x, _| {
        let x = x - mean;
        [x, x * x]
    });
    let rest = rest / count;
    let variance = (squares / count - rest * rest).larger(R::ZERO);
    [R::ONE / (variance + epsilon).root(), mean, rest]
}

/// The rows of a forward pass that one task computes.
struct NormForwardTask<'a, X: Element, S: Element> {
    x: &'a [X],
    residual: Option<(&'a [S], &'a mut [S])>,
    y: &'a mut [X],
    statistics: &'a mut [X::Wide],
}

/// The parameters of a forward pass, in the type of the computation.
struct WideParameters<R> {
    factors: Vec<R>,
    bias: Option<Vec<R>>,
    x_bias: Option<Vec<R>>,
}

impl<X: Element, S: Element<Wide = X::Wide>> NormForwardTask<'_, X, S> {
    #[inline(always)]
    fn run(mut self, formula: NormFormula, parameters: &WideParameters<X::Wide>) {
        let WideParameters {
            factors,
            bias,
            x_bias,
        } = parameters;
        let width = factors.len();
        let kept = formula.statistics();
        let mut row = vec![X::Wide::ZERO; width];
        for (i, y) in self.y.chunks_exact_mut(width).enumerate() {
            let at = i * width..(i + 1) * width;
            widen(&self.x[at.clone()], &mut row);
            if let Some((residual, sum)) = &mut self.residual {
                if let Some(x_bias) = x_bias {
                    add(&mut row, x_bias);
                }
                add_residual(&residual[at.clone()], &mut sum[at], &mut row);
            }
            let all = statistics(formula, &row);
            self.statistics[i * kept..(i + 1) * kept].copy_from_slice(&all[..kept]);
            let [rstd, mean, rest] = all;
            let normalised = row.iter().map(|x| (*x - mean - rest) * rstd);
            let products = normalised.zip(factors).map(|(x, w)| x * *w);
            match bias {
                Some(bias) => {
                    for ((y, product), bias) in y.iter_mut().zip(products).zip(bias) {
                        *y = X::narrow(product + *bias);
                    }
                }
                None => {
                    for (y, product) in y.iter_mut().zip(products) {
                        *y = X::narrow(product);
                    }
                }
            }
        }
    }
}

/// Adds a row to the residual. The sum is rounded to the type of the residual before it is normalized.
#[inline(always)]
fn add_residual<S: Element>(residual: &[S], sum: &mut [S], row: &mut [S::Wide]) {
    for ((row, sum), residual) in row.iter_mut().zip(sum).zip(residual) {
        *sum = S::narrow(*row + residual.wide());
        *row = sum.wide();
    }
}

fn forward_as<X, S>(formula: NormFormula, inputs: NamedInputs<&FlexTensor>) -> Vec<FlexTensor>
where
    X: Element,
    S: Element<Wide = X::Wide>,
{
    let shape = inputs.x.layout().shape().clone();
    let bias = |bias: Option<&FlexTensor>| bias.map(|bias| parameter(bias, X::Wide::ZERO));
    let parameters = WideParameters {
        factors: factors(formula, inputs.weight),
        bias: bias(inputs.bias),
        x_bias: bias(inputs.x_bias),
    };
    let (width, x) = (parameters.factors.len(), slice::<X>(inputs.x));
    let (rows, kept) = (x.len() / width, formula.statistics());
    let residual = inputs.residual.map(slice::<S>);

    let mut y = vec![X::narrow(X::Wide::ZERO); x.len()];
    let mut statistics = vec![X::Wide::ZERO; rows * kept];
    let mut sum = vec![S::narrow(X::Wide::ZERO); residual.map_or(0, <[S]>::len)];
    let grain = rows_per_task(width);
    let mut sums = sum.chunks_mut(grain * width);
    let outputs = y
        .chunks_mut(grain * width)
        .zip(statistics.chunks_mut(grain * kept));
    let tasks = outputs.enumerate().map(|(i, (y, statistics))| {
        let at = i * grain * width..i * grain * width + y.len();
        let residual = residual.map(|residual| &residual[at.clone()]);
        NormForwardTask {
            x: &x[at],
            residual: residual.zip(sums.next()),
            y,
            statistics,
        }
    });
    for_each_task(tasks, |task| {
        vectorized(
            #[inline(always)]
            || task.run(formula, &parameters),
        )
    });

    let mut outputs = vec![tensor(y, shape.clone()), tensor(statistics, [rows, kept])];
    if residual.is_some() {
        outputs.push(tensor(sum, shape));
    }
    outputs
}

/// The rows of a backward pass that one task computes.
struct NormBackwardTask<'a, Y: Element, S: Element> {
    source: &'a [S],
    statistics: &'a [Y::Wide],
    gradient: &'a [Y],
    so_far: Option<&'a [S]>,
    /// The gradient of the input.
    dx: Option<&'a mut [S]>,
    /// The sums of the parameter gradients over the rows of the task.
    of_parameters: EachParameter<Option<&'a mut [Y::Wide]>>,
}

impl<Y: Element, S: Element<Wide = Y::Wide>> NormBackwardTask<'_, Y, S> {
    #[inline(always)]
    fn run(mut self, formula: NormFormula, factors: &[Y::Wide]) {
        let [mut of_weight, mut of_bias, mut of_x_bias] = self.of_parameters;
        let width = factors.len();
        let kept = formula.statistics();
        let count = Y::Wide::of(width as f64);
        let mut normalised = vec![Y::Wide::ZERO; width];
        let mut product = vec![Y::Wide::ZERO; width];
        for (i, statistics) in self.statistics.chunks_exact(kept).enumerate() {
            let at = i * width..(i + 1) * width;
            let (rstd, mean, rest) = if formula.centred {
                (statistics[0], statistics[1], statistics[2])
            } else {
                (statistics[0], Y::Wide::ZERO, Y::Wide::ZERO)
            };
            for (x, source) in normalised.iter_mut().zip(&self.source[at.clone()]) {
                *x = (source.wide() - mean - rest) * rstd;
            }
            widen(&self.gradient[at.clone()], &mut product);
            if let Some(of_weight) = &mut of_weight {
                for ((sum, x), g) in of_weight.iter_mut().zip(&normalised).zip(&product) {
                    *sum += *x * *g;
                }
            }
            if let Some(of_bias) = &mut of_bias {
                add(of_bias, &product);
            }
            let Some(dx) = &mut self.dx else { continue };
            for (g, w) in product.iter_mut().zip(factors) {
                *g = *g * *w;
            }
            let [along, all] = sums(&normalised, &product, |x, g| [x * g, g]);
            let along = along / count;
            let all = if formula.centred {
                all / count
            } else {
                Y::Wide::ZERO
            };
            let dx = &mut dx[at.clone()];
            let rows = dx.iter_mut().zip(&mut product).zip(&normalised);
            match self.so_far {
                Some(so_far) => {
                    for (((dx, g), x), so_far) in rows.zip(&so_far[at]) {
                        *g = (*g - all - *x * along) * rstd + so_far.wide();
                        *dx = S::narrow(*g);
                    }
                }
                None => {
                    for ((dx, g), x) in rows {
                        *g = (*g - all - *x * along) * rstd;
                        *dx = S::narrow(*g);
                    }
                }
            }
            if let Some(of_x_bias) = &mut of_x_bias {
                add(of_x_bias, &product);
            }
        }
    }
}

/// Returns the requested gradients: of the input, and of the parameters as sums over rows.
fn backward_as<Y, S>(
    formula: NormFormula,
    wanted: NormGradients,
    inputs: &[FlexTensor],
) -> (Option<FlexTensor>, Vec<FlexTensor>)
where
    Y: Element,
    S: Element<Wide = Y::Wide>,
{
    let weight = &inputs[3];
    let shape = inputs[0].layout().shape().clone();
    let (source, gradient) = (slice::<S>(&inputs[0]), slice::<Y>(&inputs[2]));
    let statistics = slice::<Y::Wide>(&inputs[1]);
    let so_far = inputs.get(4).map(slice::<S>);
    let factors: Vec<Y::Wide> = factors(formula, weight);
    let (width, kept) = (factors.len(), formula.statistics());
    // Tasks are larger than in the forward pass, because each task has its own sums.
    let grain = 4 * rows_per_task(width);
    let tasks = (source.len() / width).div_ceil(grain);

    let mut dx = vec![S::narrow(Y::Wide::ZERO); if wanted.input { source.len() } else { 0 }];
    let each_task = width * wanted.sums();
    let mut params = vec![Y::Wide::ZERO; tasks * each_task];
    let mut dx_chunks = dx.chunks_mut(grain * width);
    let mut param_chunks = params.chunks_mut(each_task.max(1));
    let work = (0..tasks).map(|i| {
        let at = i * grain * width..source.len().min((i + 1) * grain * width);
        let rows = at.start / width * kept..at.end / width * kept;
        let mut sums = param_chunks.next().unwrap_or_default().chunks_mut(width);
        let next = |wanted: bool| wanted.then(|| sums.next()).flatten();
        NormBackwardTask {
            source: &source[at.clone()],
            statistics: &statistics[rows],
            gradient: &gradient[at.clone()],
            so_far: so_far.map(|so_far| &so_far[at]),
            dx: dx_chunks.next(),
            of_parameters: wanted.parameters.map(next),
        }
    });
    for_each_task(work, |task: NormBackwardTask<'_, Y, S>| {
        vectorized(
            #[inline(always)]
            || task.run(formula, &factors),
        )
    });

    let mut total = vec![Y::Wide::ZERO; each_task];
    for partial in params.chunks(each_task.max(1)) {
        add(&mut total, partial);
    }
    let input = wanted.input.then(|| tensor(dx, shape));
    let sum = |values: &[Y::Wide]| tensor(values.to_vec(), [width]);
    (input, total.chunks(width).map(sum).collect())
}
