//! Assigns samples of a blend to data sets, like Megatron's `build_blending_indices`.

use crate::gpt::SamplingError;

/// The number of samples requested from a data set, divided by its share. The greedy assignment may take a few more
/// samples than the share.
const SURPLUS: f64 = 1.005;

/// Normalizes weights: divides each weight by the sum of all weights.
///
/// # Errors
///
/// [`SamplingError::Weights`] if a weight is negative or not finite, or if all weights are 0; [`SamplingError::Files`]
/// for an invalid number of weights.
pub fn normalize(weights: &[f64]) -> Result<Vec<f64>, SamplingError> {
    if weights.is_empty() || weights.len() > i16::MAX as usize {
        return Err(SamplingError::Files(weights.len()));
    }
    let sum = pairwise_sum(weights);
    let fits = |weight: &f64| weight.is_finite() && *weight >= 0.0;
    if weights.iter().all(fits) && sum.is_finite() && sum > 0.0 {
        Ok(weights.iter().map(|weight| weight / sum).collect())
    } else {
        Err(SamplingError::Weights(weights.to_vec()))
    }
}

/// Returns the sum in NumPy's order of additions, so that the bits are equal: 8 partial sums, and recursion on halves
/// above 128 values.
fn pairwise_sum(values: &[f64]) -> f64 {
    match values.len() {
        0..8 => values.iter().fold(0.0, |sum, value| sum + value),
        8..=128 => {
            let (eights, rest) = values.as_chunks::<8>();
            let mut sums = eights[0];
            for eight in &eights[1..] {
                sums.iter_mut().zip(eight).for_each(|(sum, x)| *sum += x);
            }
            let [a, b, c, d, e, f, g, h] = sums;
            let sum = ((a + b) + (c + d)) + ((e + f) + (g + h));
            rest.iter().fold(sum, |sum, value| sum + value)
        }
        length => {
            let half = length / 2 / 8 * 8;
            pairwise_sum(&values[..half]) + pairwise_sum(&values[half..])
        }
    }
}

/// Returns two numbers for each data set of a blend of `size` samples. The first is the number of samples that its
/// weight requires, and the second is the number of samples that the data set should provide, which includes a surplus.
pub fn sizes(weights: &[f64], size: u64) -> Vec<(u64, u64)> {
    let target = |weight: &f64| (size as f64 * weight).ceil();
    let targets = weights.iter().map(target);
    let with_surplus = |target: f64| (target as u64, (target * SURPLUS).ceil() as u64);
    targets.map(with_surplus).collect()
}

/// Assigns each of the `size` samples of a blend to a data set. Returns the data set of each sample, and the index of
/// the sample in its data set.
///
/// Sample `i` comes from the data set with the largest deficit `weight * max(i, 1) - taken`, where `taken` is the
/// number of earlier samples from the data set. In a tie, the first data set is chosen. Weights must sum to 1.
///
/// ```
/// use burn_megatron_data::blend::build_blending_indices;
///
/// let (datasets, samples) = build_blending_indices(&[0.75, 0.25], 4);
/// assert_eq!(datasets, [0, 1, 0, 0]);
/// assert_eq!(samples, [0, 0, 1, 2]);
/// ```
pub fn build_blending_indices(weights: &[f64], size: u64) -> (Vec<i16>, Vec<i64>) {
    let mut taken = vec![0; weights.len()];
    (0..size)
        .map(|sample| take(sample, weights, &mut taken, |_, _| true))
        .unzip()
}

/// Assigns samples like [`build_blending_indices`] with weights proportional to `counts`, the numbers of samples of the
/// data sets. Each sample of each data set is used exactly once. Data sets without remaining samples are skipped.
pub fn build_exhaustive_blending_indices(counts: &[u64]) -> (Vec<i16>, Vec<i64>) {
    let all: u64 = counts.iter().sum();
    let weights: Vec<f64> = counts
        .iter()
        .map(|count| *count as f64 / all as f64)
        .collect();
    let mut taken = vec![0; counts.len()];
    let left = |number: usize, taken: i64| (taken as u64) < counts[number];
    (0..all)
        .map(|sample| take(sample, &weights, &mut taken, left))
        .unzip()
}

/// Takes a sample from the data set with the largest deficit, among the data sets for which `left` is true.
fn take(
    sample: u64,
    weights: &[f64],
    taken: &mut [i64],
    left: impl Fn(usize, i64) -> bool,
) -> (i16, i64) {
    let (mut chosen, mut most) = (0, f64::NEG_INFINITY);
    for (number, (weight, &taken)) in weights.iter().zip(&*taken).enumerate() {
        let behind = weight * sample.max(1) as f64 - taken as f64;
        if behind > most && left(number, taken) {
            (chosen, most) = (number, behind);
        }
    }
    taken[chosen] += 1;
    (chosen as i16, taken[chosen] - 1)
}
