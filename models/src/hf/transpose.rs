//! Transposes matrices of bytes.

/// The number of rows and columns of a tile. All cache lines of a tile fit into the cache.
const TILE: usize = 32;

/// Transposes a matrix `[rows, columns]` of elements of `size` bytes to `[columns, rows]`.
fn transpose(bytes: &[u8], rows: usize, columns: usize, size: usize) -> Vec<u8> {
    match size {
        2 => of::<2>(bytes, rows, columns),
        4 => of::<4>(bytes, rows, columns),
        8 => of::<8>(bytes, rows, columns),
        other => unreachable!("a float of {other} bytes"),
    }
}

/// Transposes the last two dimensions of a tensor with this shape. Elements have `size` bytes.
pub(super) fn transpose_matrices(bytes: &[u8], shape: &[usize], size: usize) -> Vec<u8> {
    let [.., rows, columns] = *shape else {
        unreachable!("a matrix is transposed")
    };
    if bytes.len() == rows * columns * size {
        return transpose(bytes, rows, columns, size);
    }
    let matrices = bytes.chunks_exact(rows * columns * size);
    let turned = matrices.map(|matrix| transpose(matrix, rows, columns, size));
    turned.collect::<Vec<_>>().concat()
}

fn of<const SIZE: usize>(bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    let (from, _) = bytes.as_chunks::<SIZE>();
    let mut turned = vec![0; bytes.len()];
    let (to, _) = turned.as_chunks_mut::<SIZE>();
    for first_row in (0..rows).step_by(TILE) {
        for first_column in (0..columns).step_by(TILE) {
            for column in first_column..(first_column + TILE).min(columns) {
                for row in first_row..(first_row + TILE).min(rows) {
                    to[column * rows + row] = from[row * columns + column];
                }
            }
        }
    }
    turned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_goes_to_its_place() {
        for (rows, columns) in [(1, 1), (3, 70), (65, 33), (32, 64), (0, 5)] {
            for size in [2, 4, 8] {
                let element = |row: usize, column: usize| {
                    let value = (row * columns + column) as u64 * 7 + 3;
                    value.to_le_bytes()[..size].to_vec()
                };
                let matrix: Vec<u8> = (0..rows)
                    .flat_map(|row| (0..columns).flat_map(move |column| element(row, column)))
                    .collect();
                let turned: Vec<u8> = (0..columns)
                    .flat_map(|column| (0..rows).flat_map(move |row| element(row, column)))
                    .collect();
                assert_eq!(transpose(&matrix, rows, columns, size), turned);
            }
        }
    }
}
