//! Sharing a number of things out evenly over an axis.

use super::{Axis, MeshError};

/// How many divisors a message lists.
const LISTED: usize = 8;

/// The largest small divisor that is looked for: it bounds the time spent on a message, and finds
/// every divisor of numbers up to its square.
const LARGEST_TRIAL: usize = 1 << 20;

/// How many of `size` things each of the `parts` ranks of `axis` gets.
///
/// `what` names the things in the message, as in `heads`.
///
/// # Errors
///
/// [`MeshError::Uneven`] where `parts` is 0 or does not divide `size`, with the sizes that do, and
/// [`MeshError::NothingToSplit`] where `size` is 0.
pub fn split_evenly(what: &str, size: usize, axis: Axis, parts: usize) -> Result<usize, MeshError> {
    if size == 0 {
        return Err(MeshError::NothingToSplit {
            what: what.into(),
            axis,
            parts,
        });
    }
    if parts == 0 || !size.is_multiple_of(parts) {
        let fits = nearest(divisors(size), parts, LISTED);
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

/// How many of `samples` each of the `data` ranks gets, if micro-batches make that up.
///
/// Without a `micro_batch` size a rank takes all of its samples at once.
///
/// # Errors
///
/// [`MeshError::Uneven`] or [`MeshError::NothingToSplit`] where the ranks cannot share the samples,
/// and [`MeshError::MicroBatch`] where a share is no multiple of the micro-batch.
pub fn share_batch(
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
            fits: nearest(divisors(share), size, LISTED),
        }),
        _ => Ok(share),
    }
}

/// The divisors of `size` that fit and are nearest to `target`, for a message: `1, 2, 3, 4, 6, 12`; empty
/// where none fits.
pub fn divisors_near(size: usize, target: usize, fits: impl Fn(usize) -> bool) -> String {
    let fitting: Vec<_> = divisors(size).into_iter().filter(|n| fits(*n)).collect();
    match fitting[..] {
        [] => String::new(),
        [first, .., last] => listed(&nearest(fitting, target, LISTED), first, last),
        [only] => only.to_string(),
    }
}

/// The divisors of `size`, ascending; none for 0.
pub(super) fn divisors(size: usize) -> Vec<usize> {
    let root = size.isqrt();
    let small = (1..=root.min(LARGEST_TRIAL)).filter(|trial| size.is_multiple_of(*trial));
    let small: Vec<_> = small.collect();
    let large = small
        .iter()
        .rev()
        .map(|divisor| size / divisor)
        .filter(|large| *large > root);
    small.iter().copied().chain(large).collect()
}

/// The `count` values nearest to `target`, ascending.
pub(super) fn nearest(mut values: Vec<usize>, target: usize, count: usize) -> Vec<usize> {
    values.sort_by_key(|value| value.abs_diff(target));
    values.truncate(count);
    values.sort();
    values
}

/// Some of the divisors from `first` to `last`, with dots where smaller or larger ones are left out.
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
