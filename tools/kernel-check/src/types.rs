//! The types in which kernels are compiled for an architecture.

use std::collections::HashSet;

/// The architecture whose kernels are compiled in every type if no architectures are given.
pub const EVERY_TYPE: &str = "sm_90a";

/// Returns whether a kernel of another type also exists in bf16.
pub fn is_in_bf16(name: &str, names: &HashSet<String>) -> bool {
    let in_bf16 = |ty: &str| name.replacen(&format!("/{ty}"), "/bf16", 1);
    let others = ["f32", "f16"].map(in_bf16);
    others
        .iter()
        .any(|other| other != name && names.contains(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_there_is_in_bf16_is_left_out() {
        let all = [
            "a/f32/8",
            "a/bf16/8",
            "a/f16+f32/8",
            "a/bf16+f32/8",
            "b/f32",
            "c",
        ];
        let names: HashSet<_> = all.map(String::from).into();
        let left: Vec<_> = all
            .into_iter()
            .filter(|name| !is_in_bf16(name, &names))
            .collect();
        assert_eq!(left, ["a/bf16/8", "a/bf16+f32/8", "b/f32", "c"]);
    }
}
