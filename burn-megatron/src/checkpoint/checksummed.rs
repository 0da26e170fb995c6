//! JSON with a checksum. The last member of a JSON object is the checksum of all bytes before it, so that any changed
//! byte is detected.

use super::Checksum;

/// Appends a checksum and the closing brace to a JSON object. `body` begins with `{` and ends with a line break. It
/// contains the members of the object, and each member is followed by a comma.
pub fn append_checksum(mut body: String) -> Vec<u8> {
    let end = end(body.as_bytes());
    body.push_str(&end);
    body.into_bytes()
}

/// Checks that the bytes match the checksum that [`append_checksum`] added to them.
///
/// # Errors
///
/// Returns the reason as text.
pub fn check(bytes: &[u8]) -> Result<(), String> {
    let len = end(b"").len();
    let at = bytes.len().checked_sub(len);
    let Some((body, found)) = at.map(|at| bytes.split_at(at)) else {
        return Err(format!(
            "it has {} bytes, too few for a checksum",
            bytes.len()
        ));
    };
    if !found.starts_with(br#""checksum": ""#) {
        return Err(
            "it does not end with its checksum: it is cut off, or not of this format".into(),
        );
    }
    if found == end(body).as_bytes() {
        Ok(())
    } else {
        Err("its checksum does not match: it has changed since it was written".into())
    }
}

fn end(body: &[u8]) -> String {
    format!("\"checksum\": \"{}\"\n}}\n", Checksum::of(body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_changed_bit_and_each_cut_is_found() {
        let checksummed = append_checksum("{\n\"step\": 3,\n".into());
        check(&checksummed).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&checksummed).unwrap();
        assert_eq!(value["step"], 3);
        for at in 0..checksummed.len() {
            for bit in 0..8 {
                let mut changed = checksummed.clone();
                changed[at] ^= 1 << bit;
                check(&changed).unwrap_err();
            }
            check(&checksummed[..at]).unwrap_err();
        }
    }
}
