//! Assigns parameters to FSDP units.

/// Returns the FSDP unit of a parameter from its path: the element of the first list in the path, such as
/// `blocks.3`. If there is no list, the unit is the field of the model.
pub(super) fn fsdp_unit_of(path: &str) -> &str {
    let mut end = 0;
    for part in path.split('.') {
        let start = end;
        end = start + part.len() + usize::from(start > 0);
        if part.parse::<usize>().is_ok() {
            return &path[..end];
        }
    }
    path.split('.').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::fsdp_unit_of;

    #[test]
    fn a_unit_is_an_element_of_a_list_or_a_field() {
        for (path, unit) in [
            ("blocks.3.mlp.up.weight", "blocks.3"),
            ("encoder.layers.10.norm_1.gamma", "encoder.layers.10"),
            ("stages.1.blocks.2.weight", "stages.1"),
            ("embedding.weight", "embedding"),
            ("weight", "weight"),
            ("0.weight", "0"),
        ] {
            assert_eq!(fsdp_unit_of(path), unit);
        }
    }
}
