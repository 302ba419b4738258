"""The overlapped operators on eight ranks, a whole host: values, gradients and their gradients."""

import pytest
import test_bulk
import test_exchange
import test_fused
import torch

pytestmark = pytest.mark.timeout(300)
SIZE = 8


@pytest.mark.parametrize("algorithm", test_fused.FORCED)
def test_products(algorithm, seed):
    test_fused.test_all_gather_matmul(SIZE, algorithm, (2, 3, 5), 1, torch.bfloat16, seed)
    test_fused.test_gradients_of_all_gather_matmul(SIZE, algorithm, (3, 5), 0, False, seed)
    test_fused.test_matmul_reduce_scatter(SIZE, algorithm, (2, 16, 5), 1, torch.bfloat16, "avg", seed)
    test_fused.test_matmul_all_reduce(SIZE, algorithm, (9, 5), "sum", seed)


@pytest.mark.parametrize("algorithm", test_exchange.FORCED)
def test_exchanges(algorithm, seed):
    test_exchange.test_gradients_of_all_to_all_matmul(SIZE, algorithm, (16, 3), seed)
    test_exchange.test_gradients_of_matmul_all_to_all(SIZE, algorithm, (5, 3), seed)


@pytest.mark.parametrize("collective", test_bulk.COLLECTIVES)
def test_a_product_beside_a_collective(collective, seed):
    for algorithm in test_bulk.FORCED:
        test_bulk.test_bulk_overlap_matmul(SIZE, algorithm, collective, (3, 16), 1, seed)
