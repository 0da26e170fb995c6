//! Even splits over an axis, and the divisors that error messages suggest.

use super::{Axis, MeshError};

/// The maximum number of divisors in a message.
const MAX_LISTED: usize = 8;

/// The largest trial divisor, which bounds the time to build a message. All divisors are found for numbers up to its
/// square.
const MAX_TRIAL: usize = 1 << 20;

/// Splits `size` items evenly over the `parts` ranks of `axis`. Returns the number of items per rank.
///
/// `what` is the name of the items in error messages, such as `heads`.
///
/// ```
/// use burn_megatron_comm::mesh::{Axis, split_evenly};
///
/// assert_eq!(split_evenly("heads", 12, Axis::Tensor, 4)?, 3);
/// let error = split_evenly("heads", 12, Axis::Tensor, 8).unwrap_err();
/// // The message lists the sizes that fit.
/// assert!(error.to_string().contains("1, 2, 3, 4, 6, 12"));
/// # Ok::<(), burn_megatron_comm::mesh::MeshError>(())
/// ```
///
/// # Errors
///
/// [`MeshError::Uneven`], with the valid sizes, if `parts` is 0 or does not divide `size`.
/// [`MeshError::NothingToSplit`] if `size` is 0.
pub fn split_evenly(what: &str, size: usize, axis: Axis, parts: usize) -> Result<usize, MeshError> {
    if size == 0 {
        return Err(MeshError::NothingToSplit {
            what: what.into(),
            axis,
            parts,
        });
    }
    if parts == 0 || !size.is_multiple_of(parts) {
        let fits = nearest(divisors(size), parts, MAX_LISTED);
        return Err(MeshError::Uneven {
            what: what.into(),
            size,
            axis,
            parts,
            fits,
        });
    }
    Ok(size / parts)
}

/// Splits `samples` evenly over `data` ranks. Returns the number of samples per rank, which must be a multiple of
/// `micro_batch`.
///
/// If `micro_batch` is `None`, all samples of a rank form one micro-batch.
///
/// # Errors
///
/// [`MeshError::Uneven`] or [`MeshError::NothingToSplit`] if the samples cannot be split evenly over the ranks.
/// [`MeshError::MicroBatch`] if the number of samples per rank is not a multiple of the micro-batch size.
pub fn samples_per_rank(
    samples: usize,
    data: usize,
    micro_batch: Option<usize>,
) -> Result<usize, MeshError> {
    let share = split_evenly("samples", samples, Axis::Data, data)?;
    match micro_batch {
        Some(size) if size == 0 || !share.is_multiple_of(size) => Err(MeshError::MicroBatch {
            samples,
            data,
            share,
            micro_batch: size,
            fits: nearest(divisors(share), size, MAX_LISTED),
        }),
        _ => Ok(share),
    }
}

/// Formats the divisors of `size` that satisfy `fits` and are nearest to `target` as a list, such as
/// `1, 2, 3, 4, 6, 12`. Returns an empty string if there is no such divisor.
pub fn divisors_near(size: usize, target: usize, fits: impl Fn(usize) -> bool) -> String {
    let fitting: Vec<_> = divisors(size).into_iter().filter(|n| fits(*n)).collect();
    match fitting[..] {
        [] => String::new(),
        [first, .., last] => listed(&nearest(fitting, target, MAX_LISTED), first, last),
        [only] => only.to_string(),
    }
}

/// Returns the divisors of `size` in ascending order. Returns no divisors for 0.
pub(super) fn divisors(size: usize) -> Vec<usize> {
    let root = size.isqrt();
    let small = (1..=root.min(MAX_TRIAL)).filter(|trial| size.is_multiple_of(*trial));
    let small: Vec<_> = small.collect();
    let large = small
        .iter()
        .rev()
        .map(|divisor| size / divisor)
        .filter(|large| *large > root);
    small.iter().copied().chain(large).collect()
}

/// Returns the `count` values that are nearest to `target`, in ascending order.
pub(super) fn nearest(mut values: Vec<usize>, target: usize, count: usize) -> Vec<usize> {
    values.sort_by_key(|value| value.abs_diff(target));
    values.truncate(count);
    values.sort();
    values
}

/// Lists the multiples of `step` nearest to `number`, which is not a multiple: `8 or 12`.
pub(super) fn multiples_around(number: usize, step: usize) -> String {
    let below = number / step * step;
    match (below, below.checked_add(step)) {
        (0, Some(above)) => above.to_string(),
        (below, Some(above)) => format!("{below} or {above}"),
        (below, None) => below.to_string(),
    }
}

/// Formats some divisors as a list. Adds dots at an end where divisors between `first` and `last` are omitted.
pub(super) fn listed(divisors: &[usize], first: usize, last: usize) -> String {
    let texts: Vec<_> = divisors.iter().map(usize::to_string).collect();
    let before = if divisors.first() == Some(&first) {
        ""
    } else {
        "..., "
    };
    let after = if divisors.last() == Some(&last) {
        ""
    } else {
        ", ..."
    };
    format!("{before}{}{after}", texts.join(", "))
}
