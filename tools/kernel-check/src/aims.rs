//! Targets for kernels that stream memory, as fractions of the copy bandwidth of an H200.

/// The target of a group of kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Aim {
    /// Prefix of the names of the kernels.
    pub of: &'static str,
    /// A part of the names of the kernels, or an empty string.
    pub with: &'static str,
    /// The fraction of the copy bandwidth.
    pub share: f64,
    /// Indices of the parameters that point to cached data. Cached data are weights and tables shared by all rows,
    /// and values shared by all units of a row.
    pub cached: &'static [u32],
    /// The reason why a bound below the target is accepted.
    pub excuse: Option<&'static str>,
}

const fn aim(of: &'static str, share: f64, cached: &'static [u32]) -> Aim {
    Aim {
        of,
        with: "",
        share,
        cached,
        excuse: None,
    }
}

const ACTIVATED: &str = "the activation is computed for each code, in place of a pass that writes and one that reads it";

/// All targets. The first target that matches a kernel is used.
pub const AIMS: &[Aim] = &[
    aim("accumulate/", 0.90, &[]),
    Aim {
        with: "/Gelu-",
        excuse: Some(
            "43 instructions a value, half of them multiply-adds: an exponential, a reciprocal and a \
             polynomial, so that the tail has the bits of the CPU",
        ),
        ..aim("activation/forward/", 0.90, &[1])
    },
    aim("activation/forward/", 0.90, &[1]),
    aim("activation/backward/", 0.90, &[]),
    Aim {
        with: "bias-true",
        ..aim("activation/sums/", 0.90, &[1])
    },
    aim("activation/sums/", 0.90, &[]),
    aim("adamw/", 0.90, &[4, 5, 6]),
    aim("bias_dropout_add/forward/", 0.90, &[1]),
    aim("bias_dropout_add/backward/", 0.75, &[]),
    aim("column_sum/partials/", 0.90, &[]),
    aim("cross_entropy/gradient/", 0.85, &[1, 2, 3]),
    aim("cross_entropy/loss_and_gradient/", 0.85, &[1, 2]),
    aim("cross_entropy/", 0.85, &[1]),
    aim("fp8/amax/", 0.85, &[]),
    Aim {
        with: "/GeluTanh/",
        excuse: Some(ACTIVATED),
        ..aim("fp8/quantize/", 0.75, &[1])
    },
    Aim {
        with: "/SwiGlu/",
        excuse: Some(ACTIVATED),
        ..aim("fp8/quantize/", 0.75, &[1])
    },
    aim("fp8/quantize/", 0.75, &[1]),
    Aim {
        with: "e2m1",
        excuse: Some("this architecture has no instruction for E2M1"),
        ..aim("fp8/encode/", 0.85, &[])
    },
    aim("fp8/", 0.85, &[]),
    Aim {
        with: "held0",
        excuse: Some(
            "rows that do not fit in registers are read, and their exponentials made, twice",
        ),
        ..aim("masked_softmax/forward/", 0.85, &[])
    },
    aim("masked_softmax/", 0.85, &[]),
    aim("norm/forward/", 0.90, &[2, 3, 4]),
    aim("norm/backward/", 0.75, &[1, 3]),
    aim("norm/partials/", 0.75, &[1]),
    aim("rope/keys/", 0.85, &[3, 4]),
    aim("rope/", 0.85, &[1, 2]),
    aim("sum_of_squares/", 0.90, &[]),
];

/// Returns the target of a kernel.
pub fn of(name: &str) -> Option<&'static Aim> {
    let mut aims = AIMS.iter();
    aims.find(|aim| name.starts_with(aim.of) && name.contains(aim.with))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_aim_that_fits_counts() {
        let found = |name: &str| of(name).map(|aim| (aim.share, aim.cached, aim.excuse.is_some()));
        let gelu = "activation/forward/bf16/Gelu-4096-256x2";
        assert_eq!(found(gelu), Some((0.90, &[1][..], true)));
        let tanh = "activation/forward/bf16/GeluTanh-4096-256x2";
        assert_eq!(found(tanh), Some((0.90, &[1][..], false)));
        let sums = "activation/sums/bf16/Gelu-4096-bias-false-weight-true";
        assert_eq!(found(sums), Some((0.90, &[][..], false)));
        assert_eq!(found("norm/backward/f32/128").map(|aim| aim.0), Some(0.75));
        assert_eq!(found("fp8/quantize/mx/bf16").map(|aim| aim.0), Some(0.75));
        assert_eq!(found("attention/forward/bf16/64"), None);
    }
}
