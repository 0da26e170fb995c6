//! The GPU architectures that kernels are compiled for.

/// An architecture, with the limits of one device of this architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arch {
    /// The name as the compilers expect it. A trailing `a` enables architecture-specific features.
    pub name: &'static str,
    /// Compute capability times ten.
    pub version: u32,
    /// The number of multiprocessors of the device.
    pub multiprocessors: u32,
    /// The maximum shared memory of a cube, in bytes.
    pub shared_memory: usize,
}

/// A100, H100 and H200, B200. The limits come from the CUDA programming guide.
pub const ARCHS: [Arch; 3] = [
    Arch {
        name: "sm_80",
        version: 80,
        multiprocessors: 108,
        shared_memory: 163 * 1024,
    },
    Arch {
        name: "sm_90a",
        version: 90,
        multiprocessors: 132,
        shared_memory: 227 * 1024,
    },
    Arch {
        name: "sm_100a",
        version: 100,
        multiprocessors: 148,
        shared_memory: 227 * 1024,
    },
];

/// Returns the architecture with this name. The error lists all names.
pub fn parse(name: &str) -> Result<Arch, String> {
    let found = ARCHS.into_iter().find(|arch| arch.name == name);
    found.ok_or_else(|| {
        let names: Vec<_> = ARCHS.iter().map(|arch| arch.name).collect();
        format!(
            "invalid architecture {name:?}: expected one of {}",
            names.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_names_are_found_and_the_error_lists_them() {
        for arch in ARCHS {
            assert_eq!(parse(arch.name), Ok(arch));
        }
        assert_eq!(
            parse("sm_90").unwrap_err(),
            "invalid architecture \"sm_90\": expected one of sm_80, sm_90a, sm_100a"
        );
    }
}
